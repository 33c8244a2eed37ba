"""Resuming a run: after a kill, an interrupt or truncation; folders and settings that are refused."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftwood import SamplingParams
from draftwood.bench.records.machine import list_versions
from draftwood.bench.records.run_folder import read_records, read_run
from draftwood.bench.run import runner
from draftwood.bench.run.engines import DrafterEngine
from draftwood.errors import DraftwoodError
from tests.tools.bench import Spy, bench, conversations
from tests.tools.cli import Command, draftwood_command  # noqa: F401 - a fixture

# --- resuming ---------------------------------------------------------------------------------------------------------


def test_a_finished_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bench(tmp_path / "a")
    monkeypatch.setattr(DrafterEngine, "generate", lambda *_: pytest.fail("in a repeat"))
    assert bench(tmp_path / "a").records == first.records


def test_interrupted_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    answer = DrafterEngine.generate

    def interrupted(self: DrafterEngine, prompts: Any, params: SamplingParams) -> Any:
        nonlocal asked
        asked += 1
        if asked == 6:
            raise KeyboardInterrupt
        return answer(self, prompts, params)

    monkeypatch.setattr(DrafterEngine, "generate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench(tmp_path / "a", dtype="float32")
    kept = read_records(tmp_path / "a")
    assert kept
    monkeypatch.setattr(DrafterEngine, "generate", answer)
    whole = bench(tmp_path / "a", dtype="float32")
    unbroken = bench(tmp_path / "b", dtype="float32")
    assert {r.key: r.token_ids for r in whole.records} == {r.key: r.token_ids for r in unbroken.records}
    times = {record.key: record.total_seconds for record in whole.records}
    assert all(times[record.key] == record.total_seconds for record in kept)  # not measured again


# The command line, killed at the start of its fourth request.
KILLED = """
import os, signal, sys
from pathlib import Path
from draftwood.bench.run.engines import DrafterEngine
from draftwood.cli.main import main

answer, requests = DrafterEngine.generate, Path(sys.argv[-1], "requests.jsonl")

def killed(self, prompts, params):
    if requests.exists() and requests.read_bytes().count(b"\\n") == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return answer(self, prompts, params)

DrafterEngine.generate = killed
main(sys.argv[1:])
"""


def test_killed_run_resumes(tmp_path: Path, draftwood_command: Command) -> None:
    folder = tmp_path / "a"
    arguments = ["bench", "--model", "tiny", "--drafters", "plain,goose", "--budget", "8", "--max-tokens", "12"]
    arguments += ["--ignore-eos", "--tasks", "code,math", "--limit", "3", "--out", str(folder)]
    requests = folder / "requests.jsonl"
    first = subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False, capture_output=True, text=True)
    assert first.returncode == -signal.SIGKILL, first.stderr
    kept = read_records(folder)
    assert len(kept) == 3 < 2 * 2 * 3
    with requests.open("ab") as handle:
        handle.write(b'{"method": "goo')  # a line truncated by a kill
    done = draftwood_command(*arguments)  # in this process, which is another one and has torch loaded
    assert done.code == 0, done.err
    run = read_run(folder)
    assert len(run.records) == len({record.key for record in run.records}) == 2 * 2 * 3
    assert {r.key: r.total_seconds for r in kept}.items() <= {r.key: r.total_seconds for r in run.records}.items()
    assert (folder / "report.html").exists()


def test_incomplete_job_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    data = conversations(tmp_path / "data", ("first", "second"))
    settings: dict[str, Any] = {"data": data, "tasks": ("talk",), "drafters": ("plain", "pld"), "temperature": 1.0}
    bench(tmp_path / "a", **settings)
    requests = tmp_path / "a" / "requests.jsonl"
    requests.write_text(requests.read_text().splitlines(keepends=True)[0])  # the first turn of plain alone
    spy.asked.clear()
    run = bench(tmp_path / "a", **settings)
    assert [(r.method, r.turn) for r in run.records] == [("plain", 0), ("plain", 1), ("pld", 0), ("pld", 1)]
    (asked,) = spy.second_turns()
    assert run.records[0].text in asked


# --- folders ----------------------------------------------------------------------------------------------------------


def test_run_is_not_resumed_with_other_settings(tmp_path: Path) -> None:
    bench(tmp_path / "a", limit=1, tasks=("code",))
    with pytest.raises(DraftwoodError, match="max_tokens"):
        bench(tmp_path / "a", limit=1, tasks=("code",), max_tokens=13)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "letter.txt").write_text("dear")
    with pytest.raises(DraftwoodError, match="contains other files"):
        bench(tmp_path / "b")


def test_run_is_not_resumed_on_another_machine_or_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"tasks": ("code",), "limit": 1}
    bench(tmp_path / "a", **settings)
    more = {**list_versions(), "new": "1"}
    with monkeypatch.context() as changed:
        changed.setattr(runner, "list_versions", lambda: more)
        bench(tmp_path / "a", **settings)  # new entries do not matter
    with monkeypatch.context() as changed:
        changed.setattr(runner, "list_versions", lambda: {**more, "torch": "0.1"})
        with pytest.raises(DraftwoodError, match="torch"):
            bench(tmp_path / "a", **settings)
    monkeypatch.setattr(runner, "describe_machine", lambda: {"processor": "another"})
    with pytest.raises(DraftwoodError, match="another machine"):
        bench(tmp_path / "a", **settings)


def test_folder_is_usable_after_kill_before_first_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".run.json.partial-0123").write_text("{")
    assert bench(tmp_path / "a", tasks=("code",), limit=1).records
    (tmp_path / "b").write_text("a file")
    with pytest.raises(DraftwoodError, match="is a file"):
        bench(tmp_path / "b")
