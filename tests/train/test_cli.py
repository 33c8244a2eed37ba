"""``draftwood train head`` and ``python -m draftwood.train``."""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path

import pytest
import torch

from draftwood.heads import load_head, save_head
from draftwood.train.config import SECTIONS, load_config, write_toml
from draftwood.train.loop.command import main as module_main
from draftwood.train.loop.plan import make_plan
from draftwood.train.loop.trainer import StepResult, Trainer
from draftwood.train.methods import METHODS, method_class
from tests.tools.cli import Command, _plain_environment, draftwood_command  # noqa: F401 - fixtures
from tests.tools.head import SMALL, random_head
from tests.tools.train import new_head
from tests.tools.trainer import configuration, data_folder

TRAIN = ("train", "head")


def wanted(out: Path, *more: str) -> list[str]:
    usual = ["model.name=tiny", f"data.folder={data_folder()}", "data.held_out=0", f"run.out={out}", "optim.steps=2"]
    return [*usual, "run.max_tokens=128", "model.device=cpu", *more]


def test_head_is_trained_and_inspected(draftwood_command: Command, tmp_path: Path) -> None:
    done = draftwood_command(*TRAIN, "--method", "eagle", "--json", *wanted(tmp_path / "run"))
    assert done.code == 0, done.err
    assert "tokens/s" in done.err
    head = json.loads(done.out)["head"]
    looked = draftwood_command("inspect", "head", head, "--model", "tiny", "--json")
    assert looked.code == 0, looked.err
    assert json.loads(looked.out)["fits"]
    used = draftwood_command(
        *("generate", "Hi", "--model", "tiny", "--drafter", "hass", "--drafter-option", f"head={head}"),
        *("--max-tokens", "4", "--budget", "4"),
    )
    assert used.code == 0, used.err


@pytest.mark.parametrize("method", ["", *METHODS])
def test_the_printed_configuration_names_every_key_and_can_be_used(
    method: str, draftwood_command: Command, tmp_path: Path
) -> None:
    text = draftwood_command("train", "config", *(["--method", method] if method else [])).out
    path = tmp_path / "my.toml"
    written = draftwood_command("train", "config", *(["--method", method] if method else []), "--out", str(path))
    assert written.out == f"{path}\n"
    assert path.read_text(encoding="utf-8") == text
    assert draftwood_command("train", "config", "--out", str(path)).code == 2  # nothing is overwritten
    config = load_config(path)
    assert config.method.name == (method or "eagle3")
    everything = re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)  # as if every key were set to its default
    tables = tomllib.loads(everything)
    assert tables.pop("method") == {"name": config.method.name, **defaults_of(config.method.name)}
    whole = {name: {**asdict(getattr(config, name))} for name in SECTIONS if name != "method"}
    assert json.loads(json.dumps(whole)) == json.loads(json.dumps(tables))
    for line in everything.split("\n"):
        assert not re.match(r"\w+ = ", line) or "  # " in line, f"{line} has no meaning"


def defaults_of(method: str) -> dict[str, object]:
    options = method_class(method).Options
    return {each.name: {} if each.default is MISSING else each.default for each in fields(options)}


def test_the_help_of_training_lists_the_keys(draftwood_command: Command) -> None:
    shown = draftwood_command(*TRAIN, "--help").out
    for key in ("[optim]", "lr = 0.0001  # peak learning rate", "required: output folder", "held_out = 64"):
        assert key in shown


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("method.steps=0", "method.steps"),
        ("method.decay=high", "method.decay"),
        ("optim.lr=-1", "optim.lr"),
        ("data.held_out=100000", "data.held_out"),
        ("head.kind=medusa", "head.kind"),
        ("head.draft_vocab_size=1000000", "head.draft_vocab_size"),
        ("run.max_tokens=8", "run.max_tokens"),
        ("model.target=gpu", "model.target"),
    ],
)
def test_errors_name_the_key(change: str, key: str, draftwood_command: Command, tmp_path: Path) -> None:
    result = draftwood_command(*TRAIN, "--method", "eagle3", *wanted(tmp_path / "run"), change)
    assert result.code == 2
    assert key in result.err


def test_plan_describes_the_run_and_writes_nothing(draftwood_command: Command, tmp_path: Path) -> None:
    more = wanted(tmp_path / "run", "method.steps=2", "optim.ema=0.9")
    asked = (*TRAIN, "--method", "eagle3", "--plan", "--no-time", *more)
    told = draftwood_command(*asked)
    assert told.code == 0, told.err
    for word in ("parameters", "optimiser", "target", "epochs", "run.cache_signals", "--no-time"):
        assert word in told.out
    content = json.loads(draftwood_command(*asked, "--json").out)
    head = new_head("eagle3")
    memory = content["memory"]
    assert memory["optimiser"] == 2 * memory["head"] == 8 * content["head_parameters"]
    assert memory["running mean"] == memory["head"]
    assert content["total_memory"] == sum(memory.values())
    assert content["signal_bytes"] == content["tokens"] * (3 + 1) * head.config.hidden_size * 4
    assert content["seconds_per_step"] is None
    assert not (tmp_path / "run").exists()


def test_a_plan_times_steps(draftwood_command: Command, tmp_path: Path) -> None:
    asked = (*TRAIN, "--method", "medusa", "--plan", *wanted(tmp_path / "run"))
    content = json.loads(draftwood_command(*asked, "--json").out)
    assert content["seconds"] == pytest.approx(2 * content["seconds_per_step"])
    assert "s per step" in draftwood_command(*asked, "--time").out
    assert not (tmp_path / "run").exists()


def test_a_plan_waits_for_one_slow_step_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []

    def slow(self: Trainer) -> StepResult:
        taken.append(30.0)
        return replace(real(self), seconds=30.0)

    real = Trainer.step
    monkeypatch.setattr(Trainer, "step", slow)
    assert make_plan(configuration(tmp_path / "run", method="medusa")).seconds_per_step == 30.0
    assert len(taken) == 1


def test_plan_reports_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Trainer) -> StepResult:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Trainer, "step", failing)
    plan = make_plan(configuration(tmp_path / "run", method="medusa"))
    assert plan.total_memory > 0
    assert dict(plan.rows())["time"] == "not measured: a step does not fit into the memory of cpu"


def test_time_option_requires_plan(draftwood_command: Command, tmp_path: Path) -> None:
    for flag in ("--time", "--no-time"):
        refused = draftwood_command(*TRAIN, "--method", "medusa", flag, *wanted(tmp_path / "run"))
        assert refused.code == 2
        assert "Add --plan" in refused.err
    assert not (tmp_path / "run").exists()


def test_plan_counts_all_guesses_per_position(draftwood_command: Command, tmp_path: Path) -> None:
    def activations(method: str, *changes: str) -> int:
        more = wanted(tmp_path / "run", "head.kind=eagle", *changes)
        told = draftwood_command(*TRAIN, "--method", method, "--plan", "--no-time", "--json", *more)
        return int(json.loads(told.out)["memory"]["activations"])

    one = activations("eagle")
    assert activations("hass", "method.steps=4") == 4 * one
    assert activations("talf", "method.width=2", "method.depth=3") == 5 * one


def test_the_module_takes_the_same_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "my.toml"
    path.write_text(write_toml(configuration(tmp_path / "run", method="eagle").tables()), encoding="utf-8")
    assert module_main(["--config", str(path), "--plan", "--no-time"]) == 0
    assert "million parameters" in capsys.readouterr().out
    assert module_main(["--config", str(path), "optim.steps=1"]) == 0
    assert (tmp_path / "run" / "head" / "config.json").is_file()
    assert module_main(["--config", str(path), "optim.stops=1"]) == 2
    assert "optim" in capsys.readouterr().err


def test_options_may_appear_between_overrides(
    draftwood_command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = wanted(tmp_path / "run")
    mixed = ["--plan", "--no-time", first, "--method", "eagle", *others, "--resume", "optim.steps=7"]
    told = draftwood_command(*TRAIN, *mixed, "--json", "optim.accumulate=2")
    assert told.code == 0, told.err
    assert json.loads(told.out)["steps"] == 7
    assert module_main(mixed) == 0
    assert "7 (" in capsys.readouterr().out
    unknown = draftwood_command(*TRAIN, *mixed, "--magic", "optim.accumulate=2")
    assert (unknown.code, "unrecognized arguments: --magic" in unknown.err) == (2, True)
    with pytest.raises(SystemExit):
        module_main([*mixed, "--magic"])
    assert "unrecognized arguments: --magic" in capsys.readouterr().err


def test_missing_required_options_are_named(draftwood_command: Command, tmp_path: Path) -> None:
    asked = (*TRAIN, "--method", "eagle", f"data.folder={tmp_path / 'x'}", f"run.out={tmp_path / 'y'}")
    assert "epochs" in draftwood_command(*asked).err
    missing = draftwood_command(*asked, "optim.steps=1")
    assert missing.code == 2
    assert "x has no training data" in missing.err
    assert not list(tmp_path.iterdir())  # a refused run leaves no files
    assert draftwood_command(*TRAIN, "--method", "magic").code == 2


def test_method_refuses_unknown_options(draftwood_command: Command, tmp_path: Path) -> None:
    unknown = draftwood_command(*TRAIN, "--method", "eagle", *wanted(tmp_path / "run", "method.magic=1"))
    assert unknown.code == 2
    assert "no option 'magic'" in unknown.err
    assert "noise" in unknown.err
    kind = draftwood_command(*TRAIN, "--method", "medusa", *wanted(tmp_path / "run", "head.kind=eagle3"))
    assert kind.code == 2
    assert "does not train heads of this kind" in kind.err
    assert not (tmp_path / "run").exists()


def test_a_head_of_another_shape_is_refused(draftwood_command: Command, tmp_path: Path) -> None:
    other = save_head(random_head("eagle", SMALL), tmp_path / "other")
    misfit = draftwood_command(*TRAIN, "--method", "eagle", *wanted(tmp_path / "run", f"head.start={other}"))
    assert misfit.code == 2
    assert not (tmp_path / "run").exists()
    assert "hidden size: the head needs 24, the target has 48" in misfit.err
    ahead = draftwood_command(*TRAIN, "--method", "medusa", *wanted(tmp_path / "next", f"head.start={other}"))
    assert ahead.code == 2
    wrong = draftwood_command(*TRAIN, "--method", "eagle", *wanted(tmp_path / "third", "head.changes.wheels=4"))
    assert wrong.code == 2
    assert "wheels" in wrong.err


def test_data_of_another_model_is_refused(draftwood_command: Command, tmp_path: Path) -> None:
    copied = tmp_path / "data"
    copied.mkdir()
    for file in Path(data_folder()).iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((copied / "manifest.json").read_text())
    asked = (*TRAIN, "--method", "eagle", *wanted(tmp_path / "run", f"data.folder={copied}"))
    manifest["model"]["fingerprint"] = "another model"
    (copied / "manifest.json").write_text(json.dumps(manifest))
    refused = draftwood_command(*asked)
    assert refused.code == 2
    assert "another" in refused.err


def test_head_can_be_fine_tuned_with_another_method(draftwood_command: Command, tmp_path: Path) -> None:
    first = draftwood_command(*TRAIN, "--method", "eagle", *wanted(tmp_path / "first"))
    assert first.code == 0, first.err
    head, config, _ = load_head(tmp_path / "first" / "head")
    head.config = replace(config, target_fingerprint="of another model")
    start = f"head.start={save_head(head, tmp_path / 'moved')}"
    further = draftwood_command(*TRAIN, "--method", "hass", *wanted(tmp_path / "second", start))
    assert further.code == 0, further.err
    assert load_head(tmp_path / "second" / "head").config.target_fingerprint == config.target_fingerprint != ""


def test_help_has_examples(draftwood_command: Command) -> None:
    assert "draftwood train head --method" in draftwood_command("train", "--help").out
    told = draftwood_command(*TRAIN, "--help").out
    assert "torchrun" in told
    assert "--resume" in told


def test_fine_tuning_method_needs_initial_head(draftwood_command: Command, tmp_path: Path) -> None:
    refused = draftwood_command(*TRAIN, "--method", "gto", *wanted(tmp_path / "run"))
    assert refused.code == 2
    assert "head.start" in refused.err
    assert "Traceback" not in refused.err
