"""A run that was stopped for any reason resumes with the same result."""

from __future__ import annotations

import errno
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from draftwood.errors import DraftwoodError, ModelError, OptionError
from draftwood.train.base import Batch, Losses, Signals
from draftwood.train.config import TrainConfig, write_toml
from draftwood.train.loop.checkpoint import Checkpoints
from draftwood.train.loop.command import main
from draftwood.train.loop.logs import read_log
from draftwood.train.loop.trainer import NotFiniteError, StepResult, Trainer
from draftwood.train.methods.unrolled import UnrolledMethod
from tests.tools.trainer import configuration, losses, run, same, state_of

EVERY = ("run.checkpoint_every=2", "optim.accumulate=2", "optim.ema=0.8", "optim.weight_decay=0.1")


def small(out: Path, *changes: str) -> TrainConfig:
    return configuration(out, "run.checkpoint_every=2", *changes, method="eagle")


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(run(small(tmp_path_factory.mktemp("unbroken") / "run")))


class KilledError(Exception):
    """Simulates a killed process."""


def kill_at_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    real = Trainer.step

    def dying(self: Trainer) -> StepResult:
        if self.progress.step == step:
            raise KilledError
        return real(self)

    monkeypatch.setattr(Trainer, "step", dying)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "talf"])
def test_resumed_run_has_losses_of_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    whole = run(configuration(tmp_path / "whole", *EVERY, method=method))
    broken = configuration(tmp_path / "broken", *EVERY, method=method)
    with monkeypatch.context() as patch:
        kill_at_step(patch, 3)  # one step after the last checkpoint: it is repeated
        with pytest.raises(KilledError):
            run(broken)
    assert Checkpoints(tmp_path / "broken", 2).steps() == [2]
    torch.manual_seed(99)  # the random state in between must not matter
    resumed = run(broken, resume=True)
    assert losses(resumed) == losses(whole)  # to the last bit
    assert [line["step"] for line in resumed] == [line["step"] for line in whole]
    for name in ("head", "checkpoints/step-00000004/head"):
        assert same(state_of(tmp_path / "broken" / name), state_of(tmp_path / "whole" / name))
    assert not same(state_of(tmp_path / "whole" / "head"), state_of(tmp_path / "whole/checkpoints/step-00000004/head"))


@pytest.mark.parametrize("asked", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_a_checkpoint_and_ends_with_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbroken: list[float], asked: signal.Signals
) -> None:
    config = small(tmp_path / "run")
    path = tmp_path / "my.toml"
    path.write_text(write_toml(config.tables()), encoding="utf-8")
    real = Trainer.step

    def interrupted(self: Trainer) -> StepResult:
        if self.progress.step == 2:
            signal.raise_signal(asked)
        return real(self)  # the current step is finished

    before = signal.getsignal(asked)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        assert main(["--config", str(path)]) == 130
    assert signal.getsignal(asked) is before
    assert Checkpoints(tmp_path / "run", 2).steps() == [2, 3]
    assert losses(run(config, resume=True)) == unbroken


def test_non_finite_loss_stops_the_run_and_keeps_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbroken: list[float]
) -> None:
    real = UnrolledMethod.losses

    def breaking(self: UnrolledMethod, batch: Batch, signals: Signals) -> Losses:
        found = real(self, batch, signals)
        return found._replace(total=found.total * float("nan")) if self.step == 2 else found

    config = small(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(UnrolledMethod, "losses", breaking)
        with pytest.raises(NotFiniteError, match=r"not finite in step 3\n  got: epoch 0, batch 2"):
            run(config)
    assert Checkpoints(tmp_path / "run", 2).steps() == [2]
    assert len(losses(read_log(tmp_path / "run" / "log.jsonl"))) == 2
    assert losses(run(config, resume=True)) == unbroken


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("write failed")])
def test_full_disk_is_reported_and_keeps_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbroken: list[float], error: Exception
) -> None:
    real = torch.save

    def filling(content: Any, path: Path) -> None:
        real(content, path)
        if content["step"] == 4:
            path.write_bytes(path.read_bytes()[:100])
            raise error

    config = small(tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", filling)
        with pytest.raises(DraftwoodError, match=r"(?s)step-00000004 cannot be written.*from step 2 with --resume"):
            run(config)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    assert losses(run(config, resume=True)) == unbroken


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    run(small(tmp_path / "run", "run.checkpoint_every=1", "run.keep=2"))
    assert Checkpoints(tmp_path / "run", 2).steps() == [3, 4]


def test_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    run(small(tmp_path / "run"))
    with pytest.raises(OptionError, match="already has a run"):
        run(small(tmp_path / "run"))


def test_run_resumes_with_its_original_configuration(tmp_path: Path) -> None:
    run(small(tmp_path / "run"))
    with pytest.raises(OptionError, match=r"another configuration\n  got: optim\.lr = 0\.002, was 0\.001"):
        run(small(tmp_path / "run", "optim.lr=2e-3"), resume=True)
    with pytest.raises(OptionError, match=r"method\.noise = 0\.5, was None"):
        run(small(tmp_path / "run", "method.noise=0.5"), resume=True)
    assert len(losses(run(small(tmp_path / "run", "validate.prompts=2", "run.keep=1"), resume=True))) == 4


def test_checkpoint_without_step_times_is_valid(tmp_path: Path) -> None:
    config = small(tmp_path / "run")
    run(config)
    path = tmp_path / "run" / "checkpoints" / "step-00000004" / "state.pt"
    state = torch.load(path, weights_only=True)
    assert state.pop("seconds") > 0.0
    torch.save(state, path)
    assert len(losses(run(config, resume=True))) == 4


def test_damaged_checkpoint_is_reported(tmp_path: Path) -> None:
    config = small(tmp_path / "run")
    run(config)
    state = tmp_path / "run" / "checkpoints" / "step-00000004" / "state.pt"
    state.write_bytes(state.read_bytes()[:200])
    with pytest.raises(ModelError, match="step-00000004 is damaged"):
        run(config, resume=True)


def test_failed_validation_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(tmp_path / "run", "run.checkpoint_every=100", "data.held_out=2")

    def failing(*_: object) -> dict[str, Any]:
        raise KilledError

    monkeypatch.setattr("draftwood.train.loop.run.validate_head", failing)
    with pytest.raises(KilledError):
        run(config)
    assert Checkpoints(tmp_path / "run", 2).steps() == [4]
