"""Benchmarks: one writer per folder, too long prompts, errors before the first run, content of the manifest."""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from draftwood.bench.records.methods import list_labels, parse_methods
from draftwood.bench.records.run_folder import lock_run, read_run
from draftwood.bench.run import runner
from draftwood.bench.run.engines import DrafterEngine
from draftwood.bench.run.runner import MAX_FAILURES, RunSpec, run_bench
from draftwood.bench.settings import BenchSettings
from draftwood.bench.tasks.load import load_tasks
from draftwood.cli.console.terminal import _KNOWN
from draftwood.config import SamplingParams
from draftwood.disk.store import DiskFullError
from draftwood.drafters import stand
from draftwood.errors import DraftwoodError, ModelError, OptionError
from draftwood.growth.spine import BRANCH, SPINE
from draftwood.models.fetch import hub_snapshot
from draftwood.sources.suffix import CORPUS_SOURCE, OWN_SOURCE
from tests.tools.cli import Command, _plain_environment, draftwood_command  # noqa: F401

BASE: dict[str, Any] = {"model": "tiny", "drafters": ("plain", "pld"), "budget": (8,), "max_tokens": 8}
LINE = ("bench", "--model", "tiny", "--tasks", "code", "--limit", "1", "--max-tokens", "8", "--budget", "8")
LONG = "much too long " * 2000


@pytest.fixture(autouse=True)
def locks_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setattr("draftwood.bench.records.run_folder.cache_home", lambda: home)
    return home


def bench(folder: Path, **settings: Any) -> Any:
    return run_bench(RunSpec(settings=BenchSettings(**{**BASE, **settings}), folder=folder))


def talk(folder: Path, *prompts: tuple[str, ...]) -> dict[str, Any]:
    folder.mkdir()
    rows = [{"id": f"p{number}", "turns": list(turns)} for number, turns in enumerate(prompts)]
    (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"data": str(folder), "tasks": ("talk",)}


# --- one writer per folder --------------------------------------------------------------------------------------------


def test_a_second_process_on_one_folder_is_refused_at_once(
    draftwood_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (*LINE, "--drafters", "plain,pld", "--out", str(tmp_path / "a"))
    with lock_run(tmp_path / "x" / ".." / "a"), monkeypatch.context() as patch:  # the same folder by another name
        patch.setattr(runner, "load_target", lambda *_, **__: pytest.fail("a model was loaded"))
        result = draftwood_command(*line)
        assert result.code == 2
        assert f"Another process is writing to the results folder\n  got: {tmp_path / 'a'}\n" in result.err
        assert "new folder" in result.err
        assert not (tmp_path / "a").exists()
    assert draftwood_command(*line).code == 0  # it is released again, also after a run
    assert draftwood_command(*line).code == 0


def test_other_folders_are_not_locked_and_locks_are_released(tmp_path: Path, locks_home: Path) -> None:
    with lock_run(tmp_path / "a"):
        assert bench(tmp_path / "b", tasks=("code",), limit=1).records
    assert list((locks_home / "locks").iterdir()) == []


def test_failed_run_releases_its_lock(tmp_path: Path) -> None:
    with pytest.raises(OptionError):
        bench(tmp_path / "a", tasks=("nonsense",))
    assert bench(tmp_path / "a", tasks=("code",), limit=1).records


# --- too long prompts -------------------------------------------------------------------------------------------------


def test_too_long_prompt_does_not_affect_its_batch(tmp_path: Path) -> None:
    asked = talk(tmp_path / "data", (LONG,), ("one two one two",), ("three",))
    run = bench(tmp_path / "a", **asked, batch=3, dtype="float32")
    alone = bench(tmp_path / "b", **asked, batch=1, dtype="float32")
    assert {record.key for record in run.records if record.error} == {
        (method, "talk", "p0", 0, 0, 0) for method in BASE["drafters"]
    }
    outputs = {record.key: record.token_ids for record in run.records}
    assert outputs == {record.key: record.token_ids for record in alone.records}
    assert len([ids for ids in outputs.values() if ids]) == 4
    assert run.manifest.failed == {}


def test_turns_before_a_too_long_turn_are_kept(tmp_path: Path) -> None:
    run = bench(tmp_path / "a", **talk(tmp_path / "data", ("first", LONG, "third")))
    found = [(record.turn, bool(record.error)) for record in run.records if record.method == "pld"]
    assert found == [(0, False), (1, True)]  # the third turn needs an answer to the second and is skipped
    again = bench(tmp_path / "a", data=str(tmp_path / "data"), tasks=("talk",))
    assert {record.key for record in again.records} == {record.key for record in run.records}


def test_too_long_prompt_does_not_reset_failure_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = DrafterEngine.generate

    def failing(self: DrafterEngine, prompts: Any, params: SamplingParams) -> Any:
        if self.llm.drafter == "pld":
            raise RuntimeError("no")
        return answer(self, prompts, params)

    monkeypatch.setattr(DrafterEngine, "generate", failing)
    run = bench(tmp_path / "a", **talk(tmp_path / "data", *[("short",), (LONG,)] * MAX_FAILURES))
    assert run.manifest.failed == {"pld": "RuntimeError: no"}


# --- refused before the first run -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "word"), [('memory = "process"\nrepeats = 2', "in a repeat"), ("limit = 1", "contains other files")]
)
def test_all_runs_of_a_recipe_are_checked_before_the_first(
    draftwood_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, word: str
) -> None:
    recipe = tmp_path / "own.toml"
    recipe.write_text(
        'title = "t"\npaper = "P"\nitem = "Table 9"\nwhat = "w"\n'
        '[settings]\ndrafters = ["plain", "pld"]\ntasks = ["code"]\nbudget = [8]\n'
        f'[[run]]\nname = "one"\n[[run]]\nname = "two"\n[run.settings]\n{own}\n'
    )
    if word == "contains other files":
        (tmp_path / "a" / "two").mkdir(parents=True)
        (tmp_path / "a" / "two" / "thesis.tex").touch()
    monkeypatch.setattr(runner, "load_target", lambda *_, **__: pytest.fail("the first run was started"))
    result = draftwood_command("bench", "--recipe", str(recipe), "--model", "tiny", "--out", str(tmp_path / "a"))
    assert result.code == 2
    assert word in result.err


def test_prompts_are_not_measured_without_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "longest_request", lambda *_: pytest.fail("every prompt was encoded for nobody"))
    assert bench(tmp_path / "a", tasks=("code",), limit=1).records


# --- messages and manifest --------------------------------------------------------------------------------------------


def test_manifest_contains_the_command_line(
    draftwood_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["pytest", "--of", "somebody"])
    line = (*LINE, "--drafters", "plain", "--out", str(tmp_path / "a b"))
    assert draftwood_command(*line).code == 0
    assert read_run(tmp_path / "a b").manifest.command == f"draftwood {' '.join(line[:-1])} '{tmp_path / 'a b'}'"


@pytest.mark.parametrize("text", ["plain", "pld", "goose:budget=16", "goose:bypass=never"])
@pytest.mark.parametrize("budgets", [[8], [8, 16]])
def test_listed_labels_match_parsed_methods(text: str, budgets: list[int | str]) -> None:
    methods = parse_methods([text], "prompt", budgets)
    assert [(method.label, method.budget) for method in methods] == list_labels(text, budgets)


def test_invalid_budget_is_refused() -> None:
    with pytest.raises(OptionError, match="budget"):
        parse_methods(["goose:budget=none"], "prompt", [8])


def failing_hub(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    fake = SimpleNamespace(snapshot_download=fail, HfApi=lambda: SimpleNamespace(dataset_info=fail))
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)  # type: ignore[arg-type]
    for name in ("DRAFTWOOD_OFFLINE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)


def test_full_disk_during_hub_download_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_hub(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(DiskFullError, match=r"^org/model could not be.*disk is full\n.*No space left.*\n.*Free some"):
        hub_snapshot("org/model", None)
    with pytest.raises(DiskFullError, match=r"^The data set org/mine could not be.*disk is full"):
        load_tasks((), "hub:org/mine", None)


def test_hub_errors_of_models_and_prompts_have_same_form(monkeypatch: pytest.MonkeyPatch) -> None:
    failing_hub(monkeypatch, ConnectionError("no route\nand more"))
    with pytest.raises(DraftwoodError, match=r"org/mine could not be.*\n.*no route\n.*--data\.$"):
        load_tasks((), "hub:org/mine", None)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match=r"org/model could not be.*\n.*no route\n.*\.gguf file\. .*switched off"):
        hub_snapshot("org/model", None)


def test_colours_name_existing_sources() -> None:
    """The command line lists the names itself because it must not import the sources."""
    others = {"datastore", "head", "pool", "position", "window"}
    assert set(_KNOWN) == {SPINE, BRANCH, stand.SOURCE, OWN_SOURCE, CORPUS_SOURCE, *others}
