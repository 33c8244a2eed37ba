"""The benchmark's run: who is asked what, in which order, what is written down, and how it goes on after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftwood import LLM, SamplingParams
from draftwood.bench.engines import OwnEngine
from draftwood.bench.methods import parse_methods, split_methods
from draftwood.bench.records import Run, read_records, read_run
from draftwood.bench.runner import FAILURES_ALLOWED, Request, run_bench
from draftwood.bench.schedule import schedule
from draftwood.bench.settings import Settings
from draftwood.bench.tasks import load_tasks
from draftwood.errors import DraftwoodError, OptionError

BASE: dict[str, Any] = {
    "model": "tiny",
    "drafters": ("plain", "pld", "goose"),
    "budget": (8,),
    "max_tokens": 12,
    "limit": 2,
    "tasks": ("code", "chat"),
}


def bench(folder: Path, **settings: Any) -> Run:
    return run_bench(Request(settings=Settings(**{**BASE, **settings}), folder=folder))


def test_every_method_answers_every_turn_of_every_prompt(tmp_path: Path) -> None:
    run = bench(tmp_path / "a")
    counts = Counter((record.method, record.task) for record in run.records)
    assert counts == {(m, t): n for m in BASE["drafters"] for t, n in (("code", 2), ("chat", 4))}
    assert {record.turn for record in run.records if record.task == "chat"} == {0, 1}
    again = read_run(tmp_path / "a")
    assert [replace(record, run="") for record in again.records] == [replace(r, run="") for r in run.records]
    assert again.manifest == run.manifest
    assert run.manifest.finished is not None


def test_greedy_outputs_are_judged_whoever_came_first(tmp_path: Path) -> None:
    run = bench(tmp_path / "a", dtype="float32")
    verdicts = {record.method: record.lossless and record.lossless.verdict for record in run.records}
    assert verdicts == {"plain": None, "pld": "identical", "goose": "identical"}
    assert all(record.lossless is not None for record in run.records if record.method != "plain")


def test_the_second_turn_is_asked_with_the_first_answer(tmp_path: Path) -> None:
    run = bench(tmp_path / "a", drafters=("plain",), tasks=("chat",), limit=1)
    (task,) = load_tasks(["chat"], None, 1)
    prompt = task.prompts[0]
    first, second = run.records
    llm = LLM("tiny", drafter="plain", budget=1)
    messages = [
        {"role": "user", "content": prompt.turns[0]},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": prompt.turns[1]},
    ]
    from draftwood.prompts import prompt_ids

    expected = llm.generate(prompt_ids(llm.tokenizer, messages), SamplingParams(max_tokens=12))[0]
    assert second.token_ids == expected.token_ids
    assert second.prompt_tokens == len(prompt_ids(llm.tokenizer, messages))


def test_methods_take_turns_and_nobody_always_begins() -> None:
    tasks = load_tasks(["code", "math"], None, 3)
    methods = parse_methods(["plain", "pld", "goose"], "prompt", [8])
    jobs = schedule(tasks, methods, 1, 2)
    assert len(jobs) == 2 * 2 * 3 * 3
    rounds = [jobs[at : at + 3] for at in range(0, len(jobs), 3)]
    for group in rounds:
        assert {job.method.label for job in group} == {"plain", "pld", "goose"}
        assert len({(job.task, job.prompts, job.repeat) for job in group}) == 1
    assert [group[0].task for group in rounds[:4]] == ["code", "math", "code", "math"]
    begins = Counter(group[0].method.label for group in rounds)
    assert max(begins.values()) - min(begins.values()) <= 1


def test_batches_hold_all_prompts_once() -> None:
    tasks = load_tasks(["code"], None, 5)
    methods = parse_methods(["plain"], "prompt", [8])
    jobs = schedule(tasks, methods, 2, 1)
    assert [len(job.prompts) for job in jobs] == [2, 2, 1]
    assert [prompt for job in jobs for prompt in job.prompts] == list(tasks[0].prompts)


def test_a_batch_gives_the_same_tokens_and_one_speed(tmp_path: Path) -> None:
    alone = bench(tmp_path / "a", tasks=("code",), dtype="float32")
    together = bench(tmp_path / "b", tasks=("code",), dtype="float32", batch=2)
    tokens = {record.key: record.token_ids for record in alone.records}
    assert {record.key: record.token_ids for record in together.records} == tokens
    speeds = {r.decode_tokens / r.decode_seconds for r in together.records if r.method == "goose"}
    assert max(speeds) == pytest.approx(min(speeds))


def test_trajectories_are_samples_of_one_prompt(tmp_path: Path) -> None:
    run = bench(tmp_path / "a", drafters=("stand", "recycling"), temperature=0.8, trajectories=(1, 3), tasks=("chat",))
    keys = Counter((r.method, r.prompt, r.turn) for r in run.records)
    assert set(keys.values()) == {3}
    assert {turn for _, _, turn in keys} == {0}
    assert {record.sample for record in run.records} == {0, 1, 2}
    outputs = {tuple(r.token_ids) for r in run.records if r.method == "stand" and r.prompt == run.records[0].prompt}
    assert len(outputs) == 3
    assert all(record.lossless is None for record in run.records)


def test_repeats_have_seeds_of_their_own(tmp_path: Path) -> None:
    run = bench(tmp_path / "a", drafters=("plain",), temperature=1.0, repeats=2, tasks=("code",), limit=1)
    first, second = run.records
    assert (first.repeat, second.repeat) == (0, 1)
    assert first.token_ids != second.token_ids


def test_a_finished_run_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = bench(tmp_path / "a")
    monkeypatch.setattr(OwnEngine, "answer", lambda *_: pytest.fail("asked again"))
    assert bench(tmp_path / "a").records == [replace(record, run="a") for record in first.records]


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    answer = OwnEngine.answer

    def interrupted(self: OwnEngine, prompts: Any, params: SamplingParams) -> Any:
        nonlocal asked
        asked += 1
        if asked == 9:  # three of them warm up
            raise KeyboardInterrupt
        return answer(self, prompts, params)

    monkeypatch.setattr(OwnEngine, "answer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench(tmp_path / "a", dtype="float32")
    kept = read_records(tmp_path / "a")
    assert kept
    monkeypatch.setattr(OwnEngine, "answer", answer)
    whole = bench(tmp_path / "a", dtype="float32")
    unbroken = bench(tmp_path / "b", dtype="float32")
    assert {r.key: r.token_ids for r in whole.records} == {r.key: r.token_ids for r in unbroken.records}
    times = {record.key: record.total_seconds for record in whole.records}
    assert all(times[record.key] == record.total_seconds for record in kept)  # not measured again


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    command = [sys.executable, "-m", "draftwood", "bench", "--model", "tiny", "--drafters", "plain,goose"]
    command += ["--budget", "8", "--max-tokens", "400", "--ignore-eos", "--tasks", "code,math", "--out", str(folder)]
    environment = {**os.environ, "DRAFTWOOD_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    requests = folder / "requests.jsonl"
    while process.poll() is None and (not requests.exists() or requests.read_bytes().count(b"\n") < 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = read_records(folder)
    if len(kept) >= 32:
        pytest.skip("it was done before it could be killed")
    with requests.open("ab") as handle:
        handle.write(b'{"method": "goo')  # what a kill in the middle of a line leaves
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = read_run(folder)
    assert len(run.records) == len({record.key for record in run.records}) == 2 * 2 * 8
    assert {r.key: r.total_seconds for r in kept}.items() <= {r.key: r.total_seconds for r in run.records}.items()
    assert (folder / "report.html").exists()


def test_one_failing_method_does_not_lose_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwood.drafters.pld import PromptLookupDrafter

    def broken(self: Any, budget: int) -> Any:
        raise RuntimeError("a broken drafter")

    monkeypatch.setattr(PromptLookupDrafter, "propose", broken)
    notes: list[str] = []
    request = Request(settings=Settings(**{**BASE, "limit": 4}), folder=tmp_path / "a")
    run = run_bench(request, note=notes.append)
    failed = [record for record in run.records if record.error]
    assert {record.method for record in failed} == {"pld"}
    assert len(failed) == FAILURES_ALLOWED
    assert "a broken drafter" in run.manifest.failed["pld"]
    assert any("pld" in note for note in notes)
    good = Counter(record.method for record in run.records if not record.error)
    assert good == {"plain": 4 + 8, "goose": 4 + 8}
    monkeypatch.undo()
    mended = run_bench(request)  # what failed is tried again
    assert not [record for record in mended.records if record.error]
    assert mended.manifest.failed == {}
    assert Counter(record.method for record in mended.records)["pld"] == 12


def test_a_wrong_output_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = OwnEngine.answer

    def wrong(self: OwnEngine, prompts: Any, params: SamplingParams) -> Any:
        answers = answer(self, prompts, params)
        if self.llm.drafter == "goose":
            ids = answers[0][0].token_ids
            answers[0][0] = answers[0][0]._replace(token_ids=[(ids[0] + 1) % 256, *ids[1:]])
        return answers

    monkeypatch.setattr(OwnEngine, "answer", wrong)
    run = bench(tmp_path / "a", dtype="float32", tasks=("code",), limit=1)
    verdicts = {record.method: record.lossless for record in run.records}
    assert verdicts["goose"] is not None
    assert verdicts["goose"].verdict == "error"
    assert verdicts["goose"].position == 0
    assert verdicts["pld"] is not None
    assert verdicts["pld"].verdict == "identical"


def test_a_run_is_not_continued_with_other_settings(tmp_path: Path) -> None:
    bench(tmp_path / "a", limit=1, tasks=("code",))
    with pytest.raises(DraftwoodError, match="max_tokens"):
        bench(tmp_path / "a", limit=1, tasks=("code",), max_tokens=13)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "letter.txt").write_text("dear")
    with pytest.raises(DraftwoodError, match="something else"):
        bench(tmp_path / "b")


def test_the_manifest_says_what_ran(tmp_path: Path) -> None:
    bench(tmp_path / "a", limit=1, tasks=("code",))
    content = json.loads((tmp_path / "a" / "run.json").read_text())
    assert content["model"]["name"] == "tiny"
    assert content["machine"]["cores"] >= 1
    assert content["software"]["torch"]
    assert [method["label"] for method in content["methods"]] == ["plain", "pld", "goose"]
    assert content["tasks"]["code"]["prompts"] == 1


def test_methods_are_read_as_they_are_typed() -> None:
    typed = "plain,goose:bypass=copied,extension=levels,pld:budget=4,sam+recycling"
    assert split_methods(typed) == ["plain", "goose:bypass=copied,extension=levels", "pld:budget=4", "sam+recycling"]
    methods = parse_methods(split_methods(typed), "prompt", [8, 16])
    assert [(m.label, m.budget) for m in methods] == [
        ("plain", 1),
        ("goose:bypass=copied,extension=levels @8", 8),
        ("goose:bypass=copied,extension=levels @16", 16),
        ("pld:budget=4", 4),
        ("sam+recycling @8", 8),
        ("sam+recycling @16", 16),
    ]
    assert {m.family for m in methods[1:3]} == {"goose:bypass=copied,extension=levels"}
    for wrong in ("goos", "goose:bypass", "goose:nonsense=1", ":a=1", "goose:budget=0"):
        with pytest.raises(OptionError):
            parse_methods([wrong], "prompt", [8])
    with pytest.raises(OptionError, match="twice"):
        parse_methods(["pld", "pld"], "prompt", [8])


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": 0},
        {"repeats": 0},
        {"batch": -1},
        {"trajectories": ()},
        {"trajectories": (4,)},
        {"dtype": "int3"},
        {"drafters": ()},
        {"temperature": -1.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Settings(**wrong)
