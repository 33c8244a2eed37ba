"""``benchmarks/compare_heads.py``: its commands, steps that are not repeated, errors, and its tables."""

from __future__ import annotations

import importlib
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from draftwood.bench.records.run_folder import RequestRecord, RunManifest, append_records, write_manifest
from draftwood.cli.main import build_parser
from draftwood.errors import DraftwoodError, OptionError
from tests.tools.paths import BENCHMARKS

MODULES = ("compare_heads", "compare_plan", "compare_steps", "compare_tables")
# Replaces the package in tests of processes: fast, with scripted behaviour.
FAKE = """
import sys, time
what, *rest = sys.argv[1:]
print("about to", what, file=sys.stderr, flush=True)
if what == "say":
    print(*rest)
elif what == "fail":
    sys.exit(2)
elif what == "wait":
    try:
        open("waits", "w").close()
        time.sleep(60)
    except KeyboardInterrupt:
        open("stopped", "w").close()
"""


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)  # as for a script
        yield {name: importlib.import_module(name) for name in MODULES}
    for name in MODULES:
        del sys.modules[name]


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """Arguments with prompts."""
    for place, names in (("train", ("mbpp_train", "vicuna", "dolly", "gsm8k_train")), ("bench", ("gsm8k",))):
        (tmp_path / place).mkdir()
        for name in names:
            (tmp_path / place / f"{name}.jsonl").write_text('{"id": "1", "turns": ["one two"]}\n', encoding="utf-8")
    places = ["--prompts", str(tmp_path / "train"), "--data", str(tmp_path / "bench")]
    return [*places, "--out", str(tmp_path / "out"), "--tasks", "gsm8k"]


# --- commands ---------------------------------------------------------------------------------------------------------


def planned(scripts: dict[str, ModuleType], argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The commands by stage, each as words."""
    assert scripts["compare_heads"].main([*argv, "--plan"]) == 0
    stages: dict[str, list[list[str]]] = {}
    for line in capsys.readouterr().out.splitlines():
        if line.startswith("# "):
            stages[line[2:]] = []
        else:
            list(stages.values())[-1].append(shlex.split(line)[1:])
    return stages


@pytest.mark.parametrize("comparison", ["talf", "gto"])
def test_planned_commands_parse(
    scripts: dict[str, ModuleType], comparison: str, folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    stages = planned(scripts, [comparison, *folders], capsys)
    heads = {"talf": 4, "gto": 4}[comparison]
    numbers = {"talf": [3, 4, 8, 4], "gto": [8, 3, 8, 4]}[comparison]
    assert [len(commands) for commands in stages.values()] == numbers
    parser = build_parser()
    for command in (command for commands in stages.values() for command in commands):
        parser.parse_args(command)
    drafters = {"talf": "eagle2", "gto": "eagle3"}[comparison]
    words = stages["bench"][0][stages["bench"][0].index("--drafters") + 1]
    assert [f"{drafters}:" in words, words.count("growth=")] == [True, 3]
    assert len({tuple(command) for command in stages["ranks"]}) == heads


def test_runs_have_equal_length(
    scripts: dict[str, ModuleType], folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def lengths(*argv: str) -> list[str]:
        commands = planned(scripts, [argv[0], *folders, *argv[1:], "--stages", "data,train"], capsys)["train"]
        names = ("optim.steps=", "optim.minutes=", "optim.epochs=")
        return [" ".join(word for word in command if word.startswith(names)) for command in commands]

    assert lengths("talf") == ["optim.steps=1500", *["optim.minutes=1.4"] * 3]
    assert lengths("talf", "--epochs", "3") == ["optim.steps=1500", *["optim.epochs=3"] * 3]
    assert lengths("talf", "--minutes", "2", "--set", "start:optim.minutes=1")[:2] == [
        "optim.minutes=1",
        "optim.minutes=2.0",
    ]
    assert lengths("gto") == ["optim.minutes=1.25"] * 2 + ["optim.steps=STEPS_OF_gto"]
    assert lengths("gto", "--steps", "7") == ["optim.steps=7"] * 2  # a third would repeat the first


def test_number_of_steps_is_read_from_the_other_run(
    scripts: dict[str, ModuleType], folders: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "out" / "gto" / "runs" / "gto"
    (run / "head").mkdir(parents=True)
    lines = [{"kind": "train", "step": step} for step in (1, 2, 3)] + [{"kind": "validate", "step": 3}]
    (run / "log.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert "optim.steps=3" in planned(scripts, ["gto", *folders], capsys)["train"][-1]


def test_settings_and_further_runs(
    scripts: dict[str, ModuleType], folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["talf", *folders, "--also", "path=talf", "--set", "path:method.weights=path", "--set", "data.held_out=8"]
    stages = planned(scripts, argv, capsys)
    *others, path = stages["train"]
    assert "method.weights=path" in path
    assert not any("method.weights=path" in command for command in others)
    assert all("data.held_out=8" in command for command in stages["train"])
    assert all(command[command.index("--limit") + 1] == "8" for command in stages["ranks"])
    assert len(stages["bench"]) == 10


def test_a_given_head_is_not_trained(
    scripts: dict[str, ModuleType], folders: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    stages = planned(scripts, ["talf", *folders, "--head", "smollm2-eagle3"], capsys)
    assert len(stages["train"]) == 3
    assert all("head.start=smollm2-eagle3" in command for command in stages["train"])
    assert "head=smollm2-eagle3," in stages["bench"][0][-3]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (["--prompts", "nowhere"], ["nowhere", "vicuna.jsonl", "--texts"]),
        (["--data", "nowhere"], ["nowhere", "gsm8k"]),
        (["--tasks", "humaneval"], ["humaneval"]),
        (["--texts", "nowhere"], ["nowhere has no training data"]),
        (["--stages", "train"], ["has no training data"]),
        (["--head", "nowhere"], ["nowhere"]),
        (["--set", "hast:optim.lr=1"], ["hast", "hass"]),
        (["--set", "hass:optim.speed=1"], ["speed"]),
        (["--set", "talf:method.leaves=1"], ["leaves"]),
        (["--set", "data.held_out=0.5"], ["held out", "0.5"]),
        (["--also", "talf=hass"], ["--also"]),
        (["--out", "one,two"], ["comma"]),
        (["--stages", "table"], ["No figures"]),
    ],
)
def test_errors_are_reported_before_the_first_step(
    scripts: dict[str, ModuleType],
    folders: list[str],
    changes: list[str],
    told: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert scripts["compare_heads"].main(["talf", *folders, *changes]) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in told), err


# --- processes --------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "draftwood.py").write_text(FAKE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)  # searched first for modules
    return tmp_path


def test_finished_steps_are_not_repeated(
    scripts: dict[str, ModuleType], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = scripts["compare_steps"]
    wanted = [steps.Step(name, ("say", name, "is here"), here / "results" / name, prints_result=True) for name in "abc"]
    steps.run_steps(wanted, here / "logs", 2)
    assert [(here / "results" / name).read_text() for name in "abc"] == [f"{name} is here\n" for name in "abc"]
    assert {line.split(" s · ")[1] for line in capsys.readouterr().out.splitlines()} == {"about to say"}
    (here / "results" / "b").unlink()
    steps.run_steps(wanted, here / "logs", 1)
    first, second, third = capsys.readouterr().out.splitlines()
    assert (first, third) == ("a: finished before", "c: finished before")
    assert second.startswith("b: ")
    with pytest.raises(OptionError, match="other arguments"):
        steps.run_steps([wanted[0]._replace(words=("say", "something else"))], here / "logs", 1)


def test_failure_stops_further_steps(scripts: dict[str, ModuleType], here: Path) -> None:
    steps = scripts["compare_steps"]
    wanted = [steps.Step("bad", ("fail",), here / "x"), steps.Step("next", ("say",), here / "y", prints_result=True)]
    with pytest.raises(DraftwoodError, match=r"(?s)bad failed.*about to fail.*bad\.log"):
        steps.run_steps(wanted, here / "logs", 1)
    assert not (here / "y").exists()
    assert "draftwood fail" in (here / "logs" / "bad.log").read_text()
    (here / "x").touch()
    steps.run_steps([wanted[0]._replace(codes=(0, 2))], here / "logs", 1)  # one that may end so


def test_an_interruption_stops_the_processes(
    scripts: dict[str, ModuleType], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = scripts["compare_steps"]
    sleep = steps.time.sleep

    def interrupted(seconds: float) -> None:
        sleep(seconds)
        if (here / "waits").exists():
            (here / "waits").unlink()  # once
            raise KeyboardInterrupt

    monkeypatch.setattr(steps.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        steps.run_steps([steps.Step("long", ("wait",), here / "x")], here / "logs", 1)
    assert (here / "stopped").exists()
    assert not (here / "logs" / "long.done").exists()
    assert "stopping 1 process" in capsys.readouterr().err


def test_resume_command_is_printed(
    scripts: dict[str, ModuleType],
    folders: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(scripts["compare_heads"], "run_steps", interrupted)
    assert scripts["compare_heads"].main(["talf", *folders]) == 130
    assert shlex.join(["talf", *folders]) in capsys.readouterr().err


# --- results ----------------------------------------------------------------------------------------------------------


def recorded(folder: Path, passes: dict[str, list[int]], errors: int = 0) -> None:
    """A run with 60 tokens for each prompt, in the given number of passes by growth."""
    folder.mkdir(parents=True)
    labels = {growth: f"eagle2:head=h,growth={growth},budget=60" for growth in passes}
    methods = [
        {"label": label, "kind": "drafter", "drafter": "eagle2", "options": {"head": "h", "growth": growth},
         "memory": "prompt", "budget": 60, "note": "", "family": label}
        for growth, label in labels.items()
    ]  # fmt: skip
    manifest = RunManifest(
        settings={"temperature": 0.0, "batch": 1, "trajectories": [1]}, methods=methods,
        tasks={"gsm8k": {"prompts": 3}, "mt_bench": {"prompts": 3}}, model={"name": "tiny"}, machine={}, software={},
        command="", started="", finished="",
    )  # fmt: skip
    write_manifest(folder, manifest)
    append_records(
        folder,
        [
            RequestRecord(
                method=labels[growth], task=task, prompt=str(prompt), output_tokens=60,
                stats=None if prompt < errors else {"cycles": cycles}, error="lost" if prompt < errors else None,
            )
            for growth, of_prompts in passes.items()
            for task in ("gsm8k", "mt_bench")
            for prompt, cycles in enumerate(of_prompts)
        ],
    )  # fmt: skip


def test_tables_have_the_figures_of_the_runs(scripts: dict[str, ModuleType], tmp_path: Path) -> None:
    module = scripts["compare_tables"]
    recorded(tmp_path / "one_0", {"beam": [30, 20, 30], "salf": [30, 30, 30]})
    recorded(tmp_path / "two_0", {"beam": [15, 10, 15], "salf": [20, 20, 20]}, errors=1)
    ranks = [{"rank": n, "accuracy": n / 10, "ece": n / 100} for n in (1, 2)]
    (tmp_path / "two.json").write_text(json.dumps({"worth": {"accuracy": 0.5, "ranks": ranks}}), encoding="utf-8")
    (tmp_path / "two").mkdir()
    log = [{"kind": "train", "step": step, "seconds": 0.75} for step in (1, 2)]
    (tmp_path / "two" / "log.jsonl").write_text("\n".join(map(json.dumps, log)), encoding="utf-8")
    entries = [
        module.Entry(name, tmp_path / name, {"0": tmp_path / f"{name}_0"}, tmp_path / f"{name}.json")
        for name in ("one", "two", "three")
    ]
    pairs = [("two", "one"), ("three", "two")]
    lines = list(module.tables(entries, pairs, ["beam", "salf"], ["gsm8k", "mt_bench"]))
    assert any(line.startswith("| one | - | - | 2.25 (2.00-") for line in lines)
    assert any(line.startswith("| two | 2 | 2 | 4.80 ") for line in lines)  # for the prompts that it finished
    assert "| three | - | - | - | - |" in lines
    assert "| two over one | +100.0% (100.0 to 100.0) | +50.0% (50.0 to 50.0) |" in lines
    assert "| three over two | - | - |" in lines
    assert "| two | 0.500 | 0.100 (0.01) | 0.200 (0.02) |" in lines
    assert "- two over one, T=0, beam: 4 requests in common of 6" in lines
    assert "- two, T=0, beam: 2 of 6 requests failed" in lines
