"""The benchmark's run: who is asked what, in which order, what is written down, and how it goes on after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from draftwood import LLM, SamplingParams
from draftwood.bench import peering, runner
from draftwood.bench.engines import Answer, OwnEngine
from draftwood.bench.machine import software_facts
from draftwood.bench.methods import PEER, Method, check_memories, parse_methods, split_methods
from draftwood.bench.records import Run, read_records, read_run, write_records
from draftwood.bench.runner import FAILURES_ALLOWED, Request, run_bench
from draftwood.bench.schedule import order, schedule
from draftwood.bench.settings import Settings
from draftwood.bench.tasks import load_tasks
from draftwood.errors import DraftwoodError, OptionError
from draftwood.target.build import load_target

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
    assert again.records == run.records
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


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_everybody_follows_everybody_equally_often(count: int) -> None:
    rounds = [order(number, count) for number in range(2 * count)]
    assert all(sorted(places) == list(range(count)) for places in rounds)
    follows = Counter(pair for places in rounds for pair in pairwise(places))
    assert follows == {(a, b): 2 for a in range(count) for b in range(count) if a != b}
    assert set(Counter(places[0] for places in rounds).values()) == {2}


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
    assert bench(tmp_path / "a").records == first.records


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    answer = OwnEngine.answer

    def interrupted(self: OwnEngine, prompts: Any, params: SamplingParams) -> Any:
        nonlocal asked
        asked += 1
        if asked == 6:
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
    command += ["--budget", "8", "--max-tokens", "400", "--ignore-eos", "--tasks", "code,math", "--limit", "3", "--out"]
    command.append(str(folder))
    environment = {**os.environ, "DRAFTWOOD_HOME": str(tmp_path / "home")}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    requests = folder / "requests.jsonl"
    while process.poll() is None and (not requests.exists() or requests.read_bytes().count(b"\n") < 3):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    kept = read_records(folder)
    if len(kept) >= 2 * 2 * 3:
        pytest.skip("it was done before it could be killed")
    with requests.open("ab") as handle:
        handle.write(b'{"method": "goo')  # what a kill in the middle of a line leaves
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = read_run(folder)
    assert len(run.records) == len({record.key for record in run.records}) == 2 * 2 * 3
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
        {"budget": ()},
        {"temperature": -1.0},
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Settings(**wrong)


# --- turns, failures and going on -------------------------------------------------------------------------------------


def conversations(folder: Path, *prompts: tuple[str, ...], name: str = "talk") -> str:
    folder.mkdir(exist_ok=True)
    rows = [{"id": str(number), "turns": list(turns)} for number, turns in enumerate(prompts)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


class Spy:
    """Every method says its own name and a number. Fails where it is told to; notes what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, str]] = []  # who, and the prompt's text
        self.failing: dict[str, int] = {}  # by method: the number of its next answer that fails
        self.params: list[SamplingParams] = []
        answer = OwnEngine.answer

        def spied(engine: OwnEngine, prompts: Any, params: SamplingParams) -> Any:
            who = engine.llm.drafter
            if who in self.failing:
                self.failing[who] -= 1
                if self.failing[who] < 0:
                    del self.failing[who]
                    raise RuntimeError(f"{who} fails")
            self.asked += [(who, engine.llm.tokenizer.decode(prompt)) for prompt in prompts]
            self.params.append(params)
            answers = answer(engine, prompts, params)
            return [[s._replace(text=f"{who} said {len(self.params)}.") for s in samples] for samples in answers]

        monkeypatch.setattr(OwnEngine, "answer", spied)

    def second_turns(self) -> set[str]:
        return {text for _, text in self.asked if "second" in text}


def test_all_are_asked_the_same_whoever_failed_and_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    data = conversations(tmp_path / "data", ("first", "second"))
    settings: dict[str, Any] = {"data": data, "tasks": ("talk",), "drafters": ("plain", "goose", "pld")}
    spy.failing = {"plain": 1, "goose": 0}  # plain in its second turn, goose in its first one
    bench(tmp_path / "a", **settings)
    spy.failing = {"goose": 0}
    bench(tmp_path / "a", **settings)
    run = bench(tmp_path / "a", **settings)
    assert not any(record.error for record in run.records)
    assert {who for who, text in spy.asked if "second" in text} == {"plain", "goose", "pld"}
    (asked,) = spy.second_turns()
    first = next(record for record in run.records if record.turn == 0)
    assert first.method == "pld"
    assert first.text in asked


def test_a_job_that_was_cut_off_counts_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_the_first_reason_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = iter(["it died of hunger", "it is gone", "it is gone", "it is gone"])
    answer = OwnEngine.answer

    def dying(self: OwnEngine, prompts: Any, params: SamplingParams) -> Any:
        if self.llm.drafter == "pld":
            raise DraftwoodError(next(reasons))
        return answer(self, prompts, params)

    monkeypatch.setattr(OwnEngine, "answer", dying)
    run = bench(tmp_path / "a", limit=4)
    assert run.manifest.failed == {"pld": "it died of hunger"}


def test_prompts_that_are_too_long_are_nobodys_failure(tmp_path: Path) -> None:
    conversations(tmp_path / "data", *[("much too long " * 2000,)] * 4, name="long")
    data = conversations(tmp_path / "data", ("short",), name="short")
    notes: list[str] = []
    settings = Settings(**{**BASE, "data": data, "tasks": ("long", "short"), "limit": None})
    run = run_bench(Request(settings=settings, folder=tmp_path / "a"), note=notes.append)
    assert run.manifest.failed == {}
    assert notes == []  # warmed up, too
    failed = Counter((r.method, r.task) for r in run.records if r.error and "longer than the context" in r.error)
    assert failed == {(method, "long"): 4 for method in BASE["drafters"]}
    assert Counter(r.task for r in run.records if not r.error) == {"short": 3}


def test_a_failure_leaves_the_cache_to_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwood.drafters.pld import PromptLookupDrafter

    targets: list[Any] = []
    answer, propose = OwnEngine.answer, PromptLookupDrafter.propose
    proposed = 0

    def broken(self: Any, budget: int) -> Any:
        nonlocal proposed
        proposed += 1
        if proposed > 6:
            raise RuntimeError("a broken drafter")
        return propose(self, budget)

    def spied(self: OwnEngine, prompts: Any, params: SamplingParams) -> Any:
        target = self._loaded.target
        targets.append(target)
        assert target.can_open(target.num_slots)
        return answer(self, prompts, params)

    monkeypatch.setattr(PromptLookupDrafter, "propose", broken)
    monkeypatch.setattr(OwnEngine, "answer", spied)
    run = bench(tmp_path / "a", temperature=0.8, trajectories=(3,), tasks=("code",))
    assert targets
    assert Counter(r.method for r in run.records if r.error is None) == {"plain": 6, "goose": 6}
    assert "a broken drafter" in str(next(r.error for r in run.records if r.error))


def test_a_check_that_fails_loses_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = OwnEngine.answer

    def strange(self: OwnEngine, prompts: Any, params: SamplingParams) -> Any:
        answers = answer(self, prompts, params)
        if self.llm.drafter == "goose":
            answers[0][0] = answers[0][0]._replace(token_ids=[*answers[0][0].token_ids[:2], 10**6])
        return answers

    monkeypatch.setattr(OwnEngine, "answer", strange)
    run = bench(tmp_path / "a", tasks=("code",), drafters=("goose", "plain"))  # judged at once, and at the end
    found = {r.lossless for r in run.records if r.method == "goose" and r.error is None and r.lossless}
    assert {(one.verdict, one.position, one.gap) for one in found} == {("error", 2, None)}
    assert len([r for r in run.records if r.method == "goose" and r.lossless]) == 2


# --- peers ------------------------------------------------------------------------------------------------------------


class Stranger:
    """A peer that has no process."""

    def warm_up(self, prompts: Any, params: SamplingParams) -> None: ...

    def answer(self, prompts: Any, params: SamplingParams) -> list[list[Answer]]:
        return [[Answer([1, 2], "hm", "length", len(prompt), 2, 0.5, 1.0, 0.5, None, None)] for prompt in prompts]


def test_a_peer_that_is_gone_keeps_what_it_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = Method(label="vllm", kind=PEER, drafter="vllm", note="version 1")
    monkeypatch.setattr(runner, "start_peers", lambda *_: ([(method, Stranger())], {}))
    first = bench(tmp_path / "a", drafters=("plain",), tasks=("code",))
    assert [m["label"] for m in first.manifest.methods] == ["plain", "vllm"]
    assert {r.lossless and r.lossless.verdict for r in first.records} == {None, "different"}
    unjudged = [replace(record, lossless=None) for record in first.records]
    write_records(tmp_path / "a", unjudged)
    monkeypatch.setattr(runner, "start_peers", lambda *_: ([], {"vllm": "vllm is not installed"}))
    second = bench(tmp_path / "a", drafters=("plain",), tasks=("code",))
    assert second.records == unjudged
    assert second.manifest.methods == first.manifest.methods
    assert second.manifest.absent == {"vllm": "vllm is not installed"}


def test_a_run_without_anybody_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "check_peers", lambda _: [])
    monkeypatch.setattr(runner, "start_peers", lambda *_: ([], {"vllm": "vllm is not installed"}))
    with pytest.raises(DraftwoodError, match="vllm is not installed"):
        bench(tmp_path / "a", drafters=(), peers=("vllm",))


def test_an_interrupt_while_peers_start_ends_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Started:
        facts: ClassVar[dict[str, str]] = {}

        def __init__(self, spec: Any, *_: Any) -> None:
            if spec.name == "llamacpp":
                raise KeyboardInterrupt
            self.name = spec.name

        def close(self) -> None:
            closed.append(self.name)

    monkeypatch.setattr(peering, "Peer", Started)
    monkeypatch.setattr(peering, "absent", lambda *_: None)
    monkeypatch.setattr(peering, "gguf_of", lambda *_: None)
    monkeypatch.setattr(peering, "resolve", lambda *_: SimpleNamespace(path=Path("model")))
    settings = Settings(peers=("transformers", "llamacpp"))
    with pytest.raises(KeyboardInterrupt), ExitStack() as closing:
        peering.start_peers(settings, load_target("tiny"), 100, closing)
    assert closed == ["transformers"]


def test_a_peer_named_twice_is_refused() -> None:
    with pytest.raises(OptionError, match="twice"):
        peering.check_peers(Settings(peers=("transformers", "transformers")))


# --- what is measured -------------------------------------------------------------------------------------------------


def test_warming_up_teaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = OwnEngine.answer
    known: list[object] = []

    def spied(self: OwnEngine, prompts: Any, params: SamplingParams) -> Any:
        known.append(self.llm._default.memory._of_process)
        return answer(self, prompts, params)

    monkeypatch.setattr(OwnEngine, "answer", spied)
    bench(tmp_path / "a", drafters=("recycling:memory=process",), tasks=("code",))
    assert known[0] is None
    assert known[1] is not None


def test_samples_that_run_together_share_their_time(tmp_path: Path) -> None:
    run = bench(tmp_path / "a", temperature=0.8, trajectories=(3,), batch=2, tasks=("code",), limit=1)
    speeds = [r.decode_tokens / r.decode_seconds for r in run.records if r.method == "goose"]
    assert len(speeds) == 3
    assert max(speeds) == pytest.approx(min(speeds))


def test_all_turns_of_a_batch_are_one_batch(tmp_path: Path) -> None:
    data = conversations(tmp_path / "data", ("first",), ("first", "second"), ("first",))
    run = bench(tmp_path / "a", data=data, tasks=("talk",), drafters=("plain",), batch=2, limit=None)
    batches = {(r.prompt[-1], r.turn): r.batch[-1:] for r in run.records}
    assert batches == {("0", 0): "0", ("1", 0): "0", ("1", 1): "0", ("2", 0): ""}


def test_no_seed_is_used_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer counts its samples' seeds up from the one it is given."""
    spy = Spy(monkeypatch)
    bench(tmp_path / "a", temperature=1.0, trajectories=(3,), repeats=2, tasks=("code",), limit=1, drafters=("plain",))
    assert [params.seed for params in spy.params] == [0, 3]


def test_memories_that_falsify_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tables.memory"
    check_memories(parse_methods(["plain", "goose:memory=process"], "request", [8]), 1)
    check_memories(parse_methods(["plain", "goose", "recycling"], "prompt", [8]), 2)
    check_memories(parse_methods(["plain", "goose"], str(file), [8]), 1)  # plain decoding keeps nothing
    with pytest.raises(OptionError, match="finds its own answers"):
        check_memories(parse_methods(["plain", "goose:memory=process"], "request", [8]), 2)
    with pytest.raises(OptionError, match="in one file"):
        check_memories(parse_methods(["goose", "recycling"], str(file), [8]), 1)
    with pytest.raises(OptionError, match="in one file"):
        check_memories(parse_methods(["goose"], str(file), [8, 16]), 1)


def test_a_memory_file_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "tables.memory"
    bench(tmp_path / "a", drafters=("plain", "recycling"), memory=str(file), tasks=("code",), limit=1)
    assert file.exists()


# --- folders ----------------------------------------------------------------------------------------------------------


def test_a_run_is_not_continued_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"tasks": ("code",), "limit": 1}
    bench(tmp_path / "a", **settings)
    more = {**software_facts(), "new": "1"}
    with monkeypatch.context() as changed:
        changed.setattr(runner, "software_facts", lambda: more)
        bench(tmp_path / "a", **settings)  # what was not there before changes nothing
    with monkeypatch.context() as changed:
        changed.setattr(runner, "software_facts", lambda: {**more, "torch": "0.1"})
        with pytest.raises(DraftwoodError, match="torch"):
            bench(tmp_path / "a", **settings)
    monkeypatch.setattr(runner, "machine_facts", lambda: {"processor": "another"})
    with pytest.raises(DraftwoodError, match="another machine"):
        bench(tmp_path / "a", **settings)


def test_a_kill_before_the_first_file_leaves_a_folder_to_begin_in(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".run.json.partial-0123").write_text("{")
    assert bench(tmp_path / "a", tasks=("code",), limit=1).records
    (tmp_path / "b").write_text("a file")
    with pytest.raises(DraftwoodError, match="something else"):
        bench(tmp_path / "b")
