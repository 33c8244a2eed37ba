"""Figures from records, compared with values by hand; failures, repeated requests, peers without statistics."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from draftwood.bench.figures.summary import ALL_TASKS, Cell, Interval
from draftwood.bench.records.machine import LoadMeter
from draftwood.bench.records.run_folder import ERROR, IDENTICAL, TIE, LosslessVerdict
from draftwood.bench.report.facts import headline, list_doubts, warnings
from draftwood.tree import DraftTree
from tests.tools.metrics import GOOSE, PEER, PLAIN, measured, record, run, spine_tree, summary, traced, two_tasks, value


def test_speeds_and_speedups_by_hand() -> None:
    found = summary(run(two_tasks()))
    assert found.baseline == "plain"
    assert found.tasks == ["a", "b"]
    assert [method["label"] for method in found.methods] == ["plain", "goose"]
    assert set(found.cells) == {(m, t) for m in ("plain", "goose") for t in ("a", "b", ALL_TASKS)}
    plain, goose = found.cells["plain", "a"], found.cells["goose", "a"]
    assert value(plain.tokens_per_second) == 2.0  # 40 tokens in 20 seconds
    assert value(goose.tokens_per_second) == 5.0  # 40 in 8
    assert value(goose.speedup) == 2.5
    assert value(goose.whole_speedup) == pytest.approx((40 / 10) / (40 / 22))
    assert plain.speedup == Interval(1.0, 1.0, 1.0)
    assert goose.speedup is not None
    assert (goose.speedup.low, goose.speedup.high) == pytest.approx((2.0, 10 / 3))  # prompt 1, prompt 2
    assert (goose.requests, goose.errors, goose.output_tokens) == (2, 0, 40)
    assert found.cells["goose", "b"].speedup == Interval(2.0, 2.0, 2.0)  # a single prompt: no width
    overall = found.cells["goose", ALL_TASKS]
    assert value(overall.speedup) == 2.25  # (2.5 + 2) / 2 for any number of prompts
    assert value(overall.tokens_per_second) == 4.5
    assert (overall.requests, overall.output_tokens) == (3, 48)


def test_speedup_uses_requests_common_to_both_methods_of_a_run() -> None:
    first = run([record("plain", "a", "1", 10, 10.0), record("goose", "a", "1", 10, 5.0)])
    # The second run has another speed, and goose has one more prompt there than plain.
    second = run(
        [record("plain", "a", "2", 10, 2.0), record("goose", "a", "2", 10, 1.0), record("goose", "a", "3", 1000, 1.0)],
        "two",
    )
    cell = summary(first, second).cells["goose", "a"]
    assert value(cell.speedup) == 2.0
    assert value(cell.tokens_per_second) == 1020 / 7
    lonely = run([record("plain", "a", "1", 10, 10.0)]), run([record("goose", "a", "1", 10, 5.0)], "two")
    assert summary(*lonely).cells["goose", "a"].speedup is None


def test_without_plain_decoding_there_is_no_speedup() -> None:
    found = summary(run([record("goose", "a", "1", 10, 5.0)], methods=[GOOSE]))
    assert found.baseline is None
    assert found.cells["goose", "a"].speedup is None
    assert found.cells["goose", ALL_TASKS].speedup is None
    assert value(found.cells["goose", "a"].tokens_per_second) == 2.0


def test_peer_named_plain_is_not_the_baseline() -> None:
    peer = {**PEER, "label": "llamacpp:plain", "drafter": "plain"}
    found = summary(run([record("llamacpp:plain", "a", "1", 10, 5.0)], methods=[peer]))
    assert found.baseline is None


# --- statistics -------------------------------------------------------------------------------------------------------


def test_a_known_trace() -> None:
    chain = DraftTree.chain([0, 1, 2, 3], "context", route="bypass")
    first = traced(
        (spine_tree(), [1, 4]),  # 3 tokens; tried 1, 3, 2, 4
        (chain, [1, 2, 3]),  # 4 tokens; tried all 3
        (DraftTree.root_only(0), []),  # 1 token
        draft=0.003,
        verify=0.030,
        accept=0.006,
        prefill=0.5,
        total=0.545,
    )
    second = traced((spine_tree(), []), draft=0.001, verify=0.01, accept=0.002, prefill=0.5, total=0.518)  # 1 token
    records = [
        record("goose", "a", "1", 8, 1.0, stats=first, first_token_seconds=0.5, peak_bytes=100),
        record("goose", "a", "2", 1, 1.0, stats=second, first_token_seconds=0.7, peak_bytes=300),
    ]
    cell = summary(run(records)).cells["goose", "a"]
    assert value(cell.tau) == 9 / 4
    assert cell.nodes == (4 + 3 + 0 + 4 + 4) / 4
    # Copied: nodes 1 and 2 of the first tree, three of the chain, node 1 of the last; 1 + 3 were right.
    assert cell.by_source == {"context": 4 / 6, "transition": 1 / 3}
    assert (cell.p_s, cell.p_t) == (4 / 6, 1 / 3)
    assert cell.expected_by_source == {"context": 1.0, "transition": 1.0}  # trees without estimates
    assert cell.calibration_error == pytest.approx(4 / 9, abs=1e-3)  # 5 of 9 guesses were right
    assert cell.by_depth == [2 / 3, 2 / 3, 1.0]
    assert cell.routes == {"bypass": 1 / 4, "plain": 1 / 4, "spine": 2 / 4}
    assert cell.cycle_ms == pytest.approx({"draft": 1.0, "verify": 10.0, "accept": 2.0, "other": 2.75})
    assert cell.first_token_ms == pytest.approx(600.0)
    assert cell.peak_bytes == 300
    assert cell.by_trajectories == {}


def test_other_cycle_time_is_not_negative_and_absent_for_batches() -> None:
    stats = traced((spine_tree(), []), draft=0.01, verify=0.01, accept=0.01, prefill=0.0, total=0.02)
    records = [record("goose", "a", "1", 1, 1.0, stats=stats)]
    assert summary(run(records)).cells["goose", "a"].cycle_ms["other"] == 0.0
    batched = summary(run(records, settings={"batch": 4})).cells["goose", "a"].cycle_ms
    assert batched == pytest.approx({"draft": 10.0, "verify": 10.0, "accept": 10.0})


def test_overall_tau_is_a_mean_and_shares_are_pooled() -> None:
    always, never = (spine_tree(), [1, 2]), (spine_tree(), [])
    records = [
        record("goose", "a", "1", 9, 1.0, stats=traced(always, always, always), first_token_seconds=0.1),
        record("goose", "b", "1", 1, 1.0, stats=traced(never), first_token_seconds=0.3),
    ]
    cells = summary(run(records)).cells
    assert (value(cells["goose", "a"].tau), value(cells["goose", "b"].tau)) == (3.0, 1.0)
    overall = cells["goose", ALL_TASKS]
    assert value(overall.tau) == 2.0  # 10 tokens in 4 cycles would be 2.5
    assert overall.by_depth == [3 / 4, 3 / 4]
    assert overall.p_s == 6 / 7  # two tried in each of three trees, and one
    assert overall.nodes == 5.0
    assert overall.first_token_ms == pytest.approx(200.0)


@pytest.mark.parametrize("stats", [None, {}, {"cycles": None}, {"seconds": {"draft": 1.0}}])
def test_peer_without_statistics(stats: dict[str, Any] | None) -> None:
    records = [record("plain", "a", "1", 10, 10.0), record("llamacpp", "a", "1", 10, 4.0, stats=stats)]
    cell = summary(run(records, methods=[PLAIN, PEER])).cells["llamacpp", "a"]
    assert value(cell.speedup) == 2.5
    expected = Cell(method="llamacpp", task="a", prompts=1, requests=1, output_tokens=10)
    figures = {"tokens_per_second": None, "speedup": None, "whole_speedup": None}
    assert replace(cell, **figures) == expected


def test_peer_that_reports_its_cycles() -> None:
    records = [record("llamacpp", "a", "1", 100, 4.0, stats={"cycles": 40})]
    cell = summary(run(records, methods=[PEER])).cells["llamacpp", "a"]
    assert value(cell.tau) == 2.5
    assert cell.nodes is None
    assert cell.cycle_ms == {}


def test_trajectories() -> None:
    records = [
        record("goose", "a", prompt, tokens, 1.0, sample=sample, stats={"cycles": 10})
        for prompt in "12"
        for sample, tokens in enumerate((10, 20, 30, 40))
    ]
    settings = {"trajectories": (1, 2, 4), "temperature": 0.6}
    cells = summary(run(records, settings=settings)).cells
    assert cells["goose", "a"].by_trajectories == {1: 1.0, 2: 1.5, 4: 2.5}
    assert cells["goose", ALL_TASKS].by_trajectories == {1: 1.0, 2: 1.5, 4: 2.5}


def test_verdicts_are_counted() -> None:
    verdicts = [IDENTICAL, IDENTICAL, TIE, ERROR, None]
    records = [
        record("goose", task, str(i), 10, 1.0, lossless=None if verdict is None else LosslessVerdict(verdict=verdict))
        for task in "ab"
        for i, verdict in enumerate(verdicts)
    ]
    cells = summary(run(records)).cells
    assert cells["goose", "a"].lossless == {"identical": 2, "tie": 1, "error": 1}
    assert cells["goose", ALL_TASKS].lossless == {"identical": 4, "tie": 2, "error": 2}


# --- failures, repeats, batches ---------------------------------------------------------------------------------------


def test_failed_requests_only_change_the_error_count() -> None:
    broken = record("goose", "a", "3", 999, 0.001, error="out of memory", peak_bytes=7, stats={"cycles": 1})
    records = [*two_tasks(), record("plain", "a", "3", 10, 10.0), broken]
    cells = summary(run(records)).cells
    expected = summary(run(two_tasks())).cells
    assert cells["goose", "a"] == replace(expected["goose", "a"], errors=1)
    assert cells["goose", ALL_TASKS] == replace(expected["goose", ALL_TASKS], errors=1)


def test_repeated_request_counts_once() -> None:
    """A run that was killed and resumed has duplicate lines: the last one counts."""
    early = [record("goose", "a", "1", 10, 100.0), record("goose", "b", "1", 8, 2.0, error="killed")]
    assert summary(run([*early, *two_tasks()])).cells == summary(run(two_tasks())).cells
    cells = summary(run([*two_tasks(), record("goose", "b", "1", 8, 2.0, error="killed")])).cells
    assert (cells["goose", "b"].requests, cells["goose", "b"].errors) == (0, 1)
    assert cells["goose", "b"].speedup is None


def test_mean_is_none_if_method_lacks_a_task() -> None:
    """goose fails on all of the slow task b: a mean over the other task would look too good."""
    told: dict[str, Any] = {"first_token_seconds": 0.5, "stats": {"cycles": 2, "drafted_nodes": 4}}
    whole = [replace(r, **told) for r in two_tasks()]
    broken = [replace(r, error="no memory") if (r.method, r.task) == ("goose", "b") else r for r in whole]
    settings = {"trajectories": (1, 2), "temperature": 0.6}
    mean = summary(run(broken, settings=settings)).cells["goose", ALL_TASKS]
    assert mean.tokens_per_second is mean.speedup is mean.whole_speedup is mean.tau is None
    assert mean.nodes is mean.first_token_ms is None
    assert mean.by_trajectories == {}
    assert (mean.requests, mean.errors) == (2, 1)
    assert value(summary(run(broken, settings=settings)).cells["plain", ALL_TASKS].tokens_per_second) == 2.0
    fine = summary(run(whole, settings=settings)).cells["goose", ALL_TASKS]
    assert (value(fine.speedup), fine.nodes, fine.first_token_ms) == (2.25, 3.0, 500.0)
    assert fine.by_trajectories == {1: (10.0 + 4.0) / 2, 2: (10.0 + 4.0) / 2}


def test_task_without_value_for_any_method_is_skipped_in_means() -> None:
    """A task without plain decoding has no speed-ups: the mean is over the other task."""
    records = [r for r in two_tasks() if (r.method, r.task) != ("plain", "b")]
    cells = summary(run(records)).cells
    assert value(cells["goose", ALL_TASKS].speedup) == 2.5
    assert value(cells["goose", ALL_TASKS].tokens_per_second) == 4.5
    assert cells["plain", ALL_TASKS].tokens_per_second is None


def test_single_prompt_tasks_have_wide_intervals() -> None:
    tasks = {task: {"prompts": 1} for task in "abcde"}
    pairs = [(task, seconds) for task, seconds in zip("abcde", (1.0, 2.0, 4.0, 5.0, 8.0), strict=True)]
    records = [record("plain", task, "1", 10, 10.0) for task in tasks]
    records += [record("goose", task, "1", 10, seconds) for task, seconds in pairs]
    mean = summary(run(records, tasks=tasks)).cells["goose", ALL_TASKS].speedup
    assert mean is not None
    assert mean.value == pytest.approx((10 + 5 + 2.5 + 2 + 1.25) / 5)
    assert 1.25 <= mean.low < 3 < 5 < mean.high <= 10


def test_prompts_of_one_batch_are_resampled_together() -> None:
    """A batch has one speed for any number of prompts; passes are counted per prompt."""
    batches = {str(prompt): ("1", 1.0) if prompt < 5 else ("5", 4.0) for prompt in range(1, 9)}
    records = [
        record(method, "a", prompt, 10, seconds * slower, batch=batch, stats={"cycles": 1 + int(prompt)})
        for method, slower in (("plain", 2.0), ("goose", 1.0))
        for prompt, (batch, seconds) in batches.items()
    ]
    cell = summary(run(records, settings={"batch": 4})).cells["goose", "a"]
    assert cell.tokens_per_second == pytest.approx((4.0, 2.5, 10.0))  # the slow batch, the fast one
    alone = summary(run([replace(r, batch="") for r in records], settings={"batch": 4})).cells["goose", "a"]
    assert alone.tokens_per_second is not None
    assert alone.tokens_per_second.low > 2.5  # seven slow ones are drawn in 1 of 128 resamples
    assert cell.tau == alone.tau


def test_disturbed_times_are_flagged() -> None:
    """A speed-up above tau, as on a loaded machine, is no headline without a warning."""
    stats = {"stats": {"cycles": 15}}
    records = measured({"plain": 0.2, "goose": 0.05, "pld": 0.16}, **stats)
    methods = [PLAIN, GOOSE, {**GOOSE, "label": "pld", "drafter": "pld"}]
    found = summary(run(records, other_load=0.5, methods=methods, finished="2025-01-01T00:00:00Z"))
    doubts = list_doubts(found)
    assert doubts[0] == "Other processes used 50% of the cores during the run: times are disturbed."
    assert doubts[1].startswith("goose: 4.0")
    assert "Drafting cannot gain more than that" in doubts[1]
    assert len(doubts) == 2
    assert set(doubts) <= set(warnings(found))
    assert headline(found).startswith("pld decodes 1.2")  # the fastest that can be true
    alone = summary(run([each for each in records if each.method != "pld"]))
    assert "tokens per pass: times are disturbed" in headline(alone)
    assert list_doubts(summary(run(measured({"plain": 0.2, "goose": 0.1}), other_load=0.01))) == []


def test_the_load_of_other_processes_is_measured() -> None:
    meter = LoadMeter()
    assert meter.read() is None  # too short to tell
    meter._started = (meter._started[0] - 10.0, *meter._started[1:])
    found = meter.read()
    assert found is None or 0.0 <= found < 1.0
