"""Failures of methods, prompts, outputs or checks in a benchmark run do not affect the rest of the run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftwood import SamplingParams
from draftwood.bench.run.engines import DrafterEngine
from draftwood.bench.run.runner import MAX_FAILURES, RunSpec, run_bench
from draftwood.bench.settings import BenchSettings
from draftwood.errors import DraftwoodError
from tests.tools.bench import BASE, Spy, bench, conversations


def test_one_failing_method_does_not_lose_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwood.drafters.pld import PromptLookupDrafter

    def broken(self: Any, budget: int) -> Any:
        raise RuntimeError("a broken drafter")

    monkeypatch.setattr(PromptLookupDrafter, "propose", broken)
    notes: list[str] = []
    request = RunSpec(settings=BenchSettings(**{**BASE, "limit": 4}), folder=tmp_path / "a")
    run = run_bench(request, note=notes.append)
    failed = [record for record in run.records if record.error]
    assert {record.method for record in failed} == {"pld"}
    assert len(failed) == MAX_FAILURES
    assert "a broken drafter" in run.manifest.failed["pld"]
    assert any("pld" in note for note in notes)
    good = Counter(record.method for record in run.records if not record.error)
    assert good == {"plain": 4 + 8, "goose": 4 + 8}
    monkeypatch.undo()
    mended = run_bench(request)  # failed requests are tried again
    assert not [record for record in mended.records if record.error]
    assert mended.manifest.failed == {}
    assert Counter(record.method for record in mended.records)["pld"] == 12


def test_a_wrong_output_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = DrafterEngine.generate

    def wrong(self: DrafterEngine, prompts: Any, params: SamplingParams) -> Any:
        answers = answer(self, prompts, params)
        if self.llm.drafter == "goose":
            ids = answers[0][0].token_ids
            answers[0][0] = answers[0][0]._replace(token_ids=[(ids[0] + 1) % 256, *ids[1:]])
        return answers

    monkeypatch.setattr(DrafterEngine, "generate", wrong)
    run = bench(tmp_path / "a", dtype="float32", tasks=("code",), limit=1)
    verdicts = {record.method: record.lossless for record in run.records}
    assert verdicts["goose"] is not None
    assert verdicts["goose"].verdict == "error"
    assert verdicts["goose"].position == 0
    assert verdicts["pld"] is not None
    assert verdicts["pld"].verdict == "identical"


def test_all_methods_get_same_prompts_after_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_first_failure_reason_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = iter(["it died of hunger", "it is gone", "it is gone", "it is gone"])
    answer = DrafterEngine.generate

    def dying(self: DrafterEngine, prompts: Any, params: SamplingParams) -> Any:
        if self.llm.drafter == "pld":
            raise DraftwoodError(next(reasons))
        return answer(self, prompts, params)

    monkeypatch.setattr(DrafterEngine, "generate", dying)
    run = bench(tmp_path / "a", limit=4)
    assert run.manifest.failed == {"pld": "it died of hunger"}


def test_too_long_prompts_do_not_count_as_method_failures(tmp_path: Path) -> None:
    conversations(tmp_path / "data", *[("much too long " * 2000,)] * 4, name="long")
    data = conversations(tmp_path / "data", ("short",), name="short")
    notes: list[str] = []
    settings = BenchSettings(**{**BASE, "data": data, "tasks": ("long", "short"), "limit": None})
    run = run_bench(RunSpec(settings=settings, folder=tmp_path / "a"), note=notes.append)
    assert run.manifest.failed == {}
    assert notes == []  # including the warm-up
    failed = Counter((r.method, r.task) for r in run.records if r.error and "longer than the context" in r.error)
    assert failed == {(method, "long"): 4 for method in BASE["drafters"]}
    assert Counter(r.task for r in run.records if not r.error) == {"short": 3}


def test_failed_method_frees_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftwood.drafters.pld import PromptLookupDrafter

    targets: list[Any] = []
    answer, propose = DrafterEngine.generate, PromptLookupDrafter.propose
    proposed = 0

    def broken(self: Any, budget: int) -> Any:
        nonlocal proposed
        proposed += 1
        if proposed > 6:
            raise RuntimeError("a broken drafter")
        return propose(self, budget)

    def spied(self: DrafterEngine, prompts: Any, params: SamplingParams) -> Any:
        target = self._loaded.target
        targets.append(target)
        assert target.can_open(target.num_slots)
        return answer(self, prompts, params)

    monkeypatch.setattr(PromptLookupDrafter, "propose", broken)
    monkeypatch.setattr(DrafterEngine, "generate", spied)
    run = bench(tmp_path / "a", temperature=0.8, trajectories=(3,), tasks=("code",))
    assert targets
    assert Counter(r.method for r in run.records if r.error is None) == {"plain": 6, "goose": 6}
    assert "a broken drafter" in str(next(r.error for r in run.records if r.error))


def test_failed_output_check_keeps_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = DrafterEngine.generate

    def strange(self: DrafterEngine, prompts: Any, params: SamplingParams) -> Any:
        answers = answer(self, prompts, params)
        if self.llm.drafter == "goose":
            answers[0][0] = answers[0][0]._replace(token_ids=[*answers[0][0].token_ids[:2], 10**6])
        return answers

    monkeypatch.setattr(DrafterEngine, "generate", strange)
    run = bench(tmp_path / "a", tasks=("code",), drafters=("goose", "plain"))  # judged immediately and at the end
    found = {r.lossless for r in run.records if r.method == "goose" and r.error is None and r.lossless}
    assert {(one.verdict, one.position, one.gap) for one in found} == {("error", 2, None)}
    assert len([r for r in run.records if r.method == "goose" and r.lossless]) == 2
