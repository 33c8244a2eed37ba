"""Impossible training runs and full disks: clear errors, and no leftover files."""

from __future__ import annotations

import errno
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.disk.toml import read_toml
from draftwood.errors import DraftwoodError, ModelError, OptionError, PromptError
from draftwood.train.base import Batch, Losses, Signals
from draftwood.train.config import CONFIGURATION, TrainConfig
from draftwood.train.data.prompts import read_file
from draftwood.train.data.read import TrainingData
from draftwood.train.frozen.memory import free_bytes
from draftwood.train.frozen.stored_signals import StoredSignals
from draftwood.train.loop.checkpoint import Checkpoints
from draftwood.train.loop.logs import Board, Console, read_log
from draftwood.train.loop.plan import make_plan
from draftwood.train.loop.run import StopRequest
from draftwood.train.loop.trainer import NotFiniteError
from draftwood.train.methods.unrolled import UnrolledMethod
from tests.tools.cli import Command, _plain_environment, draftwood_command  # noqa: F401 - fixtures
from tests.tools.train import random_examples
from tests.tools.trainer import configuration, data_folder, losses, plain_trainer, run

FULL = OSError(errno.ENOSPC, "No space left on device")
VALIDATED = ("data.held_out=4", "validate.texts=4", "validate.prompts=1", "validate.max_tokens=4", "validate.budget=4")


def small(out: Path, *changes: str) -> TrainConfig:
    return configuration(out, "run.checkpoint_every=2", *changes, method="eagle")


# -- full disks ------------------------------------------------------------------------------------------------------


def test_full_disk_in_tensorboard_gives_error_without_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    board = Board("on", tmp_path)
    (path,) = tmp_path.iterdir()
    path.unlink()
    path.symlink_to("/dev/full")
    with pytest.raises(DraftwoodError, match=r"tfevents.* cannot be written\n  got: .*No space left"):
        board.add("train", {"step": 1, "loss": 2.0})
    with pytest.raises(DraftwoodError, match="cannot be written"):
        Board("on", path / "below a file")
    assert "Traceback" not in capfd.readouterr().err


def test_tensorboard_files_can_be_read(tmp_path: Path) -> None:
    module = "tensorboard.backend.event_processing.event_accumulator"
    board, found = Board("on", tmp_path), pytest.importorskip(module).EventAccumulator(str(tmp_path))
    for step in (1, 2):
        board.add("train", {"step": step, "loss": 2.0 * step, "parts": {"accuracy": 0.5}, "name": "x"})
    found.Reload()
    assert found.Tags()["scalars"] == ["train/loss", "train/parts/accuracy"]
    assert [(each.step, each.value) for each in found.Scalars("train/loss")] == [(1, 2.0), (2, 4.0)]


def test_checkpoint_on_full_disk_reports_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:858] . PytorchStreamWriter failed")

    monkeypatch.setattr(torch, "save", failing)
    monkeypatch.setattr("draftwood.train.loop.checkpoint.free_bytes", lambda _: 1234)
    with pytest.raises(DraftwoodError, match=r"state\.pt could not be .*; 1,234 bytes free there") as caught:
        run(small(tmp_path / "run"))
    assert "inline_container" not in str(caught.value)


def test_free_space_of_missing_folders(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert free_bytes(tmp_path / "file" / "below" / "it") > 0


def test_no_space_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object, **__: object) -> None:
        raise FULL

    for name in ("TemporaryDirectory", "save_head"):
        with monkeypatch.context() as patch:
            patch.setattr(f"draftwood.train.measure.validate.{name}", failing)
            with pytest.raises(DraftwoodError, match=r"(?s)among temporary files.*No space left.*TMPDIR"):
                run(small(tmp_path / name, *VALIDATED))


# -- non-finite steps ------------------------------------------------------------------------------------------------


def break_at_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    real = UnrolledMethod.losses

    def breaking(self: UnrolledMethod, batch: Batch, signals: Signals) -> Losses:
        found = real(self, batch, signals)
        return found._replace(total=found.total * float("nan")) if self.step == step else found

    monkeypatch.setattr(UnrolledMethod, "losses", breaking)


def test_advice_for_non_finite_loss_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        break_at_step(patch, 2)
        with pytest.raises(NotFiniteError, match=r"(?s)Lower optim\.lr or optim\.clip.*from step 2 with --resume"):
            run(small(out))
    assert read_log(out / "log.jsonl")[-1]["kind"] == "stop"
    with pytest.raises(OptionError, match=r"got: optim\.warmup_steps = 1, was 2\n"):
        run(small(out, "optim.lr=1e-4", "optim.warmup_steps=1"), resume=True)
    remedy = small(out, "optim.lr=1e-4", "optim.clip=0.1", "run.dtype=float32")
    lines = run(remedy, resume=True)
    assert [line["lr"] for line in lines] == pytest.approx([5e-4, 1e-3, 1e-4, 5e-5])
    assert {line["kind"] for line in lines} == {"train"}
    assert TrainConfig.of(read_toml(out / "config.toml", CONFIGURATION)) == remedy
    with pytest.raises(OptionError, match="another configuration"):  # the error is gone
        run(small(out, "optim.lr=1e-5", "optim.clip=0.1", "run.dtype=float32"), resume=True)


def test_advice_without_checkpoint_is_to_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        break_at_step(patch, 0)
        with pytest.raises(NotFiniteError, match=r"start again \(there is no checkpoint yet\) with --resume"):
            run(small(tmp_path / "run"))
    assert len(losses(run(small(tmp_path / "run", "optim.lr=1e-4"), resume=True))) == 4


# -- a last validation that failed -----------------------------------------------------------------------------------


def test_failed_last_validation_is_repeated_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("draftwood.train.loop.run.validate_head", lambda *_: (_ for _ in ()).throw(FULL))
        with pytest.raises(OSError, match="No space"):
            run(small(out, *VALIDATED))
    assert not (out / "best").exists()
    lines = run(small(out, *VALIDATED), resume=True)
    assert [line["step"] for line in lines if line["kind"] == "validate"] == [4]
    assert "tau" in lines[-1]
    assert (out / "best" / "config.json").is_file()
    assert Checkpoints(out, 2).load(4).state["best"] == lines[-1]["tau"]
    assert run(small(out, *VALIDATED), resume=True) == lines  # only once


def test_validation_budgets_match_the_engine(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"(?s)validate\.budget.*2 to 1024"):
        small(tmp_path, "validate.budget=100000")


# -- user input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("run.max_tokens=8", "longest text does not fit"),
        ("head.changes.taps=[0, 99, 3]", r"the head reads \[99, 3\], the target has 2 layers"),
        ("run.cache_signals={}/file", "cannot be written"),
        ("run.cache_signals={}/file/below", "cannot be written"),
        ("data.max_length=8", r"has an answer after truncation\n  got: data\.max_length = 8\n  allowed: \d+ or more"),
    ],
)
def test_refused_run_leaves_no_files(tmp_path: Path, change: str, said: str) -> None:
    (tmp_path / "file").touch()
    more = () if change.startswith("data") else VALIDATED
    with pytest.raises(DraftwoodError, match=said):
        run(configuration(tmp_path / "a" / "run", *more, change.format(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_too_long_held_out_text_is_refused_at_start(tmp_path: Path) -> None:
    data = TrainingData.open(data_folder())
    longest = int(data.lengths.max())
    seed = next(seed for seed in range(1000) if data.split(20, seed)[0].lengths.max() < longest)
    changes = (f"run.max_tokens={longest - 1}", "data.held_out=20", f"run.seed={seed}")
    config = configuration(tmp_path / "run", *changes)
    with pytest.raises(OptionError, match=r"(?s)longest text does not fit.*run\.max_tokens"):
        make_plan(config, timed=False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("num_layers=1.5", r"head\.changes\.num_layers .*\n  got: 1\.5\n  allowed: an integer"),
        ("num_layers=true", "an integer"),
        ("num_heads=abc", r"head\.changes\.num_heads .*\n  got: 'abc'\n  allowed: an integer"),
        ("taps=[0, 1.5, 2]", "a list of integers"),
        ("own_embed=1", "true or false"),
        ("norm_eps=small", "a number"),
        ("foo=3", r"head\.changes has no key 'foo'\n  allowed: .*num_layers"),
        ("vocab_size=3", "has no key 'vocab_size'"),
    ],
)
def test_invalid_head_override_error_lists_allowed_values(tmp_path: Path, change: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        configuration(tmp_path, f"head.changes.{change}")


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "index.json").write_text("{"),
        lambda folder: (folder / "index.json").write_text("[]"),
        lambda folder: (folder / "index.json").write_bytes(b"\xff\xfe"),
        lambda folder: (folder / "index.json").write_text('{"of": 1}'),
        lambda folder: (folder / "states.bin").unlink(),
        lambda folder: os.truncate(folder / "states.bin", 100),
    ],
)
def test_damaged_hidden_states_are_reported(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    trainer = plain_trainer([[0, 1]])
    kept = StoredSignals(trainer.method.frozen, tmp_path, trainer.head.config.taps)
    examples = [random_examples([6, 9])]
    kept.fill(examples, torch.device("cpu"), None)
    damage(tmp_path)
    for use in (kept.open, lambda: kept.fill(examples, torch.device("cpu"), None)):
        with pytest.raises(DraftwoodError, match=r"(?s)cannot be read.*Remove the folder"):
            use()


def test_space_for_hidden_states_is_computed_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = plain_trainer([[0, 1]])
    kept = StoredSignals(trainer.method.frozen, tmp_path / "states", trainer.head.config.taps)
    monkeypatch.setattr("draftwood.train.frozen.stored_signals.free_bytes", lambda _: kept.num_bytes(6) - 1)
    with pytest.raises(DraftwoodError, match=r"got: 4,607 bytes free.*\n  allowed: at least 4,608 bytes"):
        kept.fill([random_examples([6])], torch.device("cpu"), None)
    assert not (tmp_path / "states").exists()


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04"])
def test_empty_checkpoint_is_reported(tmp_path: Path, content: bytes) -> None:
    path = Checkpoints(tmp_path, 1).path(4)
    path.mkdir(parents=True)
    (path / "state.pt").write_bytes(content)
    with pytest.raises(ModelError, match=r"(?s)step-00000004 is damaged\n  got: state\.pt.*Remove"):
        Checkpoints(tmp_path, 1).load(4)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("random"),
        lambda state: state.pop("step"),
        lambda state: state.pop("optimizer"),
        lambda state: state.update(place=[1, 2, 3, 4, 5, 6, 7]),
        lambda state: state.update(optimizer=3),
        lambda state: state.update(random=[{}]),
        lambda state: state["optimizer"].update({name: {"exp_avg": 3} for name in state["optimizer"]}),
    ],
)
def test_a_checkpoint_with_other_keys_is_told(tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    trainer, checkpoints = plain_trainer([[0, 1]]), Checkpoints(tmp_path, 1)
    trainer.step()
    checkpoints.save(1, trainer.snapshot())
    state = torch.load(checkpoints.path(1) / "state.pt", weights_only=True)
    change(state)
    torch.save(state, checkpoints.path(1) / "state.pt")
    with pytest.raises(ModelError, match=r"step-00000001 is damaged\n  got: state\.pt"), checkpoints.explain_damage(1):
        trainer.restore(checkpoints.load(1))


def test_malformed_lines_are_named_once(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"turns": ["a"]}\n{"turns": [}\n')
    with pytest.raises(PromptError, match=r"line 2 is not valid JSON\n  got: .* at column 12\n  allowed: .*'turns'"):
        list(read_file(path))
    path = tmp_path / "prompts.json"
    path.write_text('[\n{"turns": [}\n]')
    with pytest.raises(PromptError, match=r"got: .* at line 2, column 12\n  allowed: a list"):
        list(read_file(path))


def test_output_and_data_folders_are_required(draftwood_command: Command) -> None:
    asked = ("train", "head", "--method", "eagle", "optim.steps=1")
    assert "Required: data.folder" in draftwood_command(*asked).err
    assert "Required: run.out" in draftwood_command(*asked, "data.folder=x").err


def test_too_long_prompts_error_suggests_remedy(draftwood_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("x" * 3000)
    asked = ("train", "data", str(path), "--model", "tiny", "--out")
    for place, more, said in (
        ("a", (), "1024 tokens\n  Use shorter"),
        ("b", ("--cache-tokens", "512"), "Raise --cache-tokens"),
        ("c", ("--max-length", "99"), "Raise --max-length"),
        ("d", ("--cache-tokens", "0"), "1 or more"),
    ):
        done = draftwood_command(*asked, str(tmp_path / place), *more)
        assert (done.code, said in done.err) == (2, True), done.err


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_is_acknowledged_immediately(tmp_path: Path) -> None:
    with (tmp_path / "err").open("w+") as stream:
        stop = StopRequest(Console(stream))
        with stop.handle_signals():
            signal.raise_signal(signal.SIGINT)
            assert "press Ctrl-C again to stop at once\n" in (tmp_path / "err").read_text()
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
    quiet = StopRequest(Console(io.StringIO()))  # which is not a file
    with quiet.handle_signals():
        signal.raise_signal(signal.SIGINT)
    assert quiet.requested
