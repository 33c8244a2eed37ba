"""Careless commands must not overwrite results, waste a measurement or fail without an explanation."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from draftwood.bench.records.run_folder import LosslessVerdict, RequestRecord, read_manifest, read_records
from draftwood.bench.replay import load_recording
from draftwood.bench.settings import BenchSettings
from draftwood.disk.files import check_output
from draftwood.errors import DraftwoodError, OptionError
from tests.tools.cli import Command, _plain_environment, draftwood_command  # noqa: F401

RECORD = ("bench", "record", "--model", "tiny", "--tasks", "code", "--limit", "1", "--max-tokens", "8", "--budget", "8")


def test_a_recording_is_replaced_only_by_force(draftwood_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "a.recording"
    path.write_text("a letter")
    refused = draftwood_command(*RECORD, "--drafters", "goose", "--out", str(path))
    assert refused.code == 2
    assert "--force" in refused.err
    assert path.read_text() == "a letter"
    assert draftwood_command(*RECORD, "--drafters", "goose", "--out", str(path), "--force").code == 0
    assert load_recording(path).requests


def test_an_interrupted_recording_leaves_the_older_one(
    draftwood_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.recording"
    assert draftwood_command(*RECORD, "--drafters", "goose", "--out", str(path)).code == 0
    before = path.read_bytes()
    from draftwood.bench.replay import commands

    whole = commands.record

    def interrupted(*args: object) -> None:
        whole(*args)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "record", interrupted)
    result = draftwood_command(*RECORD, "--drafters", "goose", "--out", str(path), "--force")
    assert result.code == 130
    assert path.read_bytes() == before
    assert "partial-a.recording" in result.err
    assert load_recording(tmp_path / "partial-a.recording").requests


def test_interrupt_before_first_recording_is_reported(
    draftwood_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftwood.bench.replay import commands

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "record", interrupted)
    result = draftwood_command(*RECORD, "--drafters", "goose", "--out", str(tmp_path / "a.recording"))
    assert "Nothing was recorded" in result.err
    assert not (tmp_path / "a.recording").exists()


def test_replay_output_never_overwrites_its_recording(draftwood_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "a.recording"
    assert draftwood_command(*RECORD, "--drafters", "goose", "--out", str(path)).code == 0
    before = path.read_bytes()
    again = ("bench", "replay", str(path), "--drafters", "goose", "--budget", "8", "--out")
    for more in ((), ("--force",)):
        assert draftwood_command(*again, str(path), *more).code == 2
    assert path.read_bytes() == before
    assert draftwood_command(*again, str(tmp_path / "figures.json")).code == 0
    assert json.loads((tmp_path / "figures.json").read_text())["figures"]
    assert draftwood_command(*again, str(tmp_path / "figures.json")).code == 2


def test_output_path_is_checked_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for wrong in (tmp_path, tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OptionError):
            check_output(wrong, force=False)
    check_output(tmp_path / "file", force=True)
    check_output(tmp_path / "new" / "file", force=False)
    assert not (tmp_path / "new" / "file").exists()


@pytest.mark.parametrize("line", [("--drafter", "pld"), ("--drafter-option", "top_k=3")])
def test_tune_explains_that_drafter_needs_static_tree(draftwood_command: Command, line: tuple[str, ...]) -> None:
    result = draftwood_command("tune", "--model", "tiny", *line)
    assert result.code == 2
    assert "--static-tree" in result.err


def test_check_names_the_prompt_that_does_not_fit(draftwood_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_text("short\n" + "long " * 20_000 + "\n")
    result = draftwood_command("check", "--model", "tiny", "--max-tokens", "4", "--prompts", str(path))
    assert result.code == 2
    assert "Prompt 2" in result.err


@pytest.mark.parametrize(
    ("wrong", "word"), [({"seed": -1}, "seed"), ({"budget": (8, 8)}, "twice"), ({"trajectories": (0,)}, "0")]
)
def test_invalid_setting_is_named(wrong: dict[str, object], word: str) -> None:
    with pytest.raises(OptionError, match=word):
        BenchSettings(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("line", [("--tasks", ""), ("--tasks", "code,,chat"), ("--budget", "8,")])
def test_empty_items_in_lists_are_refused(draftwood_command: Command, line: tuple[str, str]) -> None:
    result = draftwood_command("bench", "--model", "tiny", *line)
    assert result.code == 2
    assert "empty item" in result.err


def test_error_for_damaged_file_has_next_step(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"format": "draft')
    with pytest.raises(DraftwoodError, match="new folder"):
        read_manifest(tmp_path)
    (tmp_path / "requests.jsonl").write_text('{"method": \n{}\n')
    with pytest.raises(DraftwoodError, match="Delete that line"):
        read_records(tmp_path)
    with pytest.raises(DraftwoodError, match="folder"):
        load_recording(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "3", "[]", "null", '"text"', "{}", "[" * 100_000, '{"method": 3, "task": "a", "prompt": "b"}',
        '{"method": "a", "task": "a", "prompt": "b", "lossless": 3}',
        '{"method": "a", "task": "a", "prompt": "b", "lossless": {"verdict": []}}',
        '{"method": "a", "task": "a", "prompt": "b", "token_ids": [null]}',
        '{"method": "a", "task": "a", "prompt": "b", "decode_seconds": "long"}',
        '{"method": "a", "task": "a", "prompt": "b", "stats": [1]}',
        '{"method": "a", "task": "a", "prompt": "b", "turn": true}',
    ],
    ids=lambda line: line[:70],
)  # fmt: skip
def test_odd_lines_are_named(line: str, tmp_path: Path) -> None:
    good = RequestRecord(method="a", task="b", prompt="c", lossless=LosslessVerdict(verdict="tie", gap=1)).as_json()
    (tmp_path / "requests.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(DraftwoodError, match="line 2 is not a valid record"):
        read_records(tmp_path)
    (tmp_path / "requests.jsonl").write_text(f"{good}\n")
    assert len(read_records(tmp_path)) == 1


@pytest.mark.parametrize("field", ["settings", "methods", "tasks", "model", "software", "command", "failed", "paper"])
@pytest.mark.parametrize("value", [3, [3], {"a": [1]}, None], ids=str)
def test_odd_manifests_are_refused(field: str, value: object, tmp_path: Path) -> None:
    whole = {"settings": {}, "methods": [], "tasks": {}, "model": {}, "machine": {}, "software": {}, "command": ""}
    content = {"format": "draftwood-bench", "version": 1, "started": "", **whole}
    (tmp_path / "run.json").write_text(json.dumps(content))
    assert read_manifest(tmp_path).settings == {}
    fits = isinstance(value, dict) and field in ("settings", "model")
    (tmp_path / "run.json").write_text(json.dumps({**content, field: value}))
    with nullcontext() if fits else pytest.raises(DraftwoodError, match="cannot be read"):
        read_manifest(tmp_path)
    (tmp_path / "run.json").write_text("[" * 100_000)
    with pytest.raises(DraftwoodError, match="cannot be read"):
        read_manifest(tmp_path)


def test_file_as_result_folder_is_refused(draftwood_command: Command, tmp_path: Path) -> None:
    run, letter = tmp_path / "run", tmp_path / "letter.txt"
    letter.write_text("dear")
    bench = ("bench", "--model", "tiny", "--tasks", "code", "--limit", "1", "--max-tokens", "4", "--drafters", "plain")
    assert draftwood_command(*bench, "--out", str(run)).code == 0
    for line in ((*bench, "--out", str(letter)), ("bench", "report", str(run), "--out", str(letter))):
        result = draftwood_command(*line)
        assert result.code == 2
        assert "is a file" in result.err
    assert letter.read_text() == "dear"


def test_reason_of_failed_request_is_reported(draftwood_command: Command, tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(json.dumps({"id": "short", "turns": ["hi"]}) + "\n" + json.dumps({"turns": ["x" * 20_000]}) + "\n")
    line = ("bench", "--model", "tiny", "--data", str(path), "--max-tokens", "4", "--drafters", "plain")
    result = draftwood_command(*line, "--out", str(tmp_path / "run"))
    assert result.code == 1
    assert "longer than" in result.err
    assert "own" in result.err
