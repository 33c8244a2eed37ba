"""Comparison of two runs: significant changes, noise, and values that cannot be compared."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from draftwood.bench.figures.diff import FLOOR, Change, diff_runs, judge
from draftwood.bench.figures.summary import ALL_TASKS, Interval
from draftwood.bench.records.run_folder import ERROR, IDENTICAL, TIE, BenchRun, LosslessVerdict, RequestRecord
from draftwood.bench.report.diff_table import format_changes, summarize_hidden_changes
from tests.tools.metrics import GOOSE, MACHINE, PLAIN, change, manifest, measured, record, run


def verdicts(changes: list[Change]) -> set[str]:
    return {found.verdict for found in changes}


def test_run_compared_with_itself_has_no_changes() -> None:
    one = run(measured({"plain": 0.2, "goose": 0.1}))
    changes = diff_runs(one, one)
    assert verdicts(changes) == {"same within noise"}
    assert all(found.ratio == Interval(1.0, 1.0, 1.0) for found in changes)
    assert {found.note for found in changes} == {""}
    # goose has four metrics and plain three, each over all tasks and on two.
    assert len(changes) == (4 + 3) * 3


def test_a_faster_method() -> None:
    before = run(measured({"plain": 0.2, "goose": 0.1}))
    after = run(measured({"plain": 0.2, "goose": 0.08}, seed=1), "two")
    changes = diff_runs(before, after)
    assert changes[0].metric == "speedup"
    found = change(changes, "goose", ALL_TASKS, "speedup")
    assert found.verdict == "faster"
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(1.25, rel=0.02)
    assert found.before == pytest.approx(2.0, rel=0.02)
    assert found.after == pytest.approx(2.5, rel=0.02)
    assert change(changes, "goose", "a", "tokens_per_second").verdict == "faster"
    assert change(changes, "goose", "a", "first_token_ms").verdict == "faster"  # a smaller figure
    assert change(changes, "goose", "a", "first_token_ms").after == pytest.approx(80.0)
    assert change(changes, "plain", "a", "tokens_per_second").verdict == "same within noise"
    assert change(changes, "goose", ALL_TASKS, "tau").verdict == "same within noise"
    back = diff_runs(after, before)
    assert change(back, "goose", ALL_TASKS, "speedup").verdict == "slower"
    assert change(back, "goose", "a", "first_token_ms").verdict == "slower"


def test_a_loaded_machine_proves_nothing() -> None:
    before = run(measured({"plain": 0.2, "goose": 0.1}))
    after = run(measured({"plain": 0.2, "goose": 0.08}, seed=1), "two", other_load=0.4)
    changes = diff_runs(before, after)
    assert {found.verdict for found in changes if found.metric != "tau"} == {"cannot be compared"}
    assert "other processes used 40% of the cores" in change(changes, "goose", "a", "speedup").note
    assert change(changes, "goose", "a", "tau").verdict == "same within noise"
    assert diff_runs(before, replace_load(after, 0.05)) == diff_runs(before, replace_load(after, None))


def replace_load(whole: BenchRun, load: float | None) -> BenchRun:
    return whole._replace(manifest=replace(whole.manifest, other_load=load))


def test_a_speedup_above_tau_proves_nothing() -> None:
    """A pass yields tau tokens: a drafter that seems faster than that was timed in a quieter moment."""
    stats = {"stats": {"cycles": 15}}
    before = run(measured({"plain": 0.2, "goose": 0.15}, **stats))
    after = run(measured({"plain": 0.2, "goose": 0.05}, seed=1, **stats), "two")
    found = change(diff_runs(before, after), "goose", "a", "speedup")
    assert (found.verdict, found.note) == ("cannot be compared", "a speed-up above tau: timing is disturbed")


def test_tau_by_hand() -> None:
    before = run([record("goose", "a", str(i), 10, 1.0, stats={"cycles": 5}) for i in range(6)])
    after = run([record("goose", "a", str(i), 10, 1.0, stats={"cycles": 4}) for i in range(6)], "two")
    found = change(diff_runs(before, after), "goose", "a", "tau")
    assert (found.before, found.after, found.ratio) == (2.0, 2.5, Interval(1.25, 1.25, 1.25))
    assert found.verdict == "higher"
    assert change(diff_runs(after, before), "goose", "a", "tau").verdict == "lower"


def test_uniform_slowdown_is_not_a_change_of_the_method() -> None:
    before = run(measured({"plain": 0.2, "goose": 0.1}))
    after = run(measured({"plain": 0.3, "goose": 0.15}, seed=1), "two")
    changes = diff_runs(before, after)
    assert change(changes, "goose", ALL_TASKS, "speedup").verdict == "same within noise"
    for task in ("a", "b", ALL_TASKS):
        found = change(changes, "goose", task, "tokens_per_second")
        assert found.verdict == "cannot be compared"
        assert found.note.startswith("machine may differ: plain changed too, x0.6")
    assert change(changes, "plain", "a", "tokens_per_second").note == ""


def test_different_machine_is_noted() -> None:
    before = run(measured({"plain": 0.2, "goose": 0.1}))
    after = run(before.records, "two", machine={**MACHINE, "cores": 8})
    for found in diff_runs(before, after):
        assert found.note == ("machine may differ" if found.metric in ("tokens_per_second", "first_token_ms") else "")


def test_speeds_are_compared_without_plain_decoding() -> None:
    records = measured({"goose": 0.1})
    one, two = run(records), run(records, "two", started="2025-01-02T00:00:00Z")
    changes = diff_runs(one, two)
    assert "speedup" not in {found.metric for found in changes}
    assert "no plain decoding" in change(changes, "goose", "a", "tokens_per_second").note
    assert change(diff_runs(one, one), "goose", "a", "tokens_per_second").note == ""  # same time, same machine


def test_noise_is_not_reported_as_change() -> None:
    """In 40 pairs of runs that differ only by chance, hardly any overall speed-up is reported as a change."""
    found = []
    for seed in range(40):
        sides = [run(measured({"plain": 0.2, "goose": 0.1}, noise=0.3, seed=2 * seed + side)) for side in (0, 1)]
        found.append(change(diff_runs(*sides), "goose", ALL_TASKS, "speedup").verdict)
    assert found.count("same within noise") >= 34


@pytest.mark.parametrize(
    ("ratio", "speed", "tau", "first_token"),
    [
        ((1.2, 1.1, 1.3), "faster", "higher", "slower"),
        ((0.8, 0.7, 0.9), "slower", "lower", "faster"),
        ((1.2, 0.9, 1.5), "same within noise", "same within noise", "same within noise"),
        ((0.8, 0.5, 1.1), "same within noise", "same within noise", "same within noise"),
        ((1 + FLOOR / 2, 1.001, 1.01), "same within noise", "same within noise", "same within noise"),
        ((1 - FLOOR / 2, 0.99, 0.999), "same within noise", "same within noise", "same within noise"),
    ],
)
def test_change_is_classified(ratio: tuple[float, float, float], speed: str, tau: str, first_token: str) -> None:
    interval = Interval(*ratio)
    assert judge(interval, "speedup") == judge(interval, "tokens_per_second") == speed
    assert judge(interval, "tau") == tau
    assert judge(interval, "first_token_ms") == first_token


def test_few_prompts_are_not_significant() -> None:
    before = run(measured({"plain": 0.2, "goose": 0.1}, prompts=3))
    after = run(measured({"plain": 0.2, "goose": 0.05}, prompts=3), "two")
    changes = diff_runs(before, after)
    single = change(changes, "goose", "a", "speedup")
    assert (single.verdict, single.note) == ("cannot be compared", "too few prompts: 3 of 5")
    assert single.ratio is not None
    assert single.ratio.value == pytest.approx(2.0)
    assert change(changes, "goose", ALL_TASKS, "speedup").verdict == "faster"  # six prompts


def test_one_batch_is_not_significant() -> None:
    """Ten prompts of one batch have one common time."""
    sides = [run(measured({"plain": 0.2, "goose": pace}, tasks="a", batch="0")) for pace in (0.1, 0.05)]
    changes = diff_runs(*sides)
    for metric in ("speedup", "tokens_per_second", "first_token_ms"):
        assert change(changes, "goose", "a", metric).verdict == "cannot be compared"
    assert change(changes, "goose", "a", "tau").verdict == "same within noise"


def test_noise_of_single_prompt_tasks_is_not_reported_as_change() -> None:
    found = []
    for seed in range(40):
        sides = [
            run(measured({"plain": 0.2, "goose": 0.1}, tasks="abcdef", prompts=1, noise=0.3, seed=2 * seed + side))
            for side in (0, 1)
        ]
        found.append(change(diff_runs(*sides), "goose", ALL_TASKS, "speedup").verdict)
    assert found.count("same within noise") >= 34


def test_only_common_requests_count() -> None:
    """The second run also has repeats and prompts that are ten times slower; the first run has none of them."""
    before = run(measured({"plain": 0.2, "goose": 0.1}))
    extra = [replace(r, prompt=f"new {r.prompt}", decode_seconds=10 * r.decode_seconds) for r in before.records]
    again = [replace(r, repeat=1, decode_seconds=10 * r.decode_seconds) for r in before.records]
    failed = [replace(r, prompt="broken", error="no memory") for r in before.records[:2]]
    tasks = {"a": {"prompts": 20, "sha256": "other"}, "b": {"prompts": 2, "sha256": "bb"}}
    after = run([*before.records, *extra, *again, *failed], "two", tasks=tasks)
    changes = diff_runs(before, after)
    assert verdicts(changes) == {"same within noise"}
    notes = {task: change(changes, "goose", task, "speedup").note for task in ("a", "b", ALL_TASKS)}
    told = "prompts differ: only common ids are compared"
    assert notes == {"a": told, "b": "", ALL_TASKS: told}


def test_last_record_of_repeated_request_counts() -> None:
    one = run(measured({"plain": 0.2, "goose": 0.1}))
    resumed = run([*(replace(r, decode_seconds=99.0) for r in one.records), *one.records], "two")
    assert verdicts(diff_runs(one, resumed)) == {"same within noise"}


def test_methods_and_tasks_of_only_one_run_are_listed() -> None:
    before = run(measured({"plain": 0.2, "goose": 0.1, "pld": 0.1}, tasks="ab"))
    after = run(measured({"plain": 0.2, "goose": 0.1, "sam": 0.1}, tasks="bc"), "two")
    changes = diff_runs(before, after)
    lonely = {(c.method, c.task): c.note for c in changes if c.metric == "present"}
    assert lonely == {
        ("*", "a"): "only in the first run",
        ("*", "c"): "only in the second run",
        ("pld", ALL_TASKS): "only in the first run",
        ("sam", ALL_TASKS): "only in the second run",
    }
    assert {c.task for c in changes if c.metric == "speedup"} == {"b"}
    assert all(c.verdict == "cannot be compared" for c in changes if c.metric == "present")


def test_missing_task_and_missing_common_requests() -> None:
    before = run(measured({"plain": 0.2, "goose": 0.1}))
    after = run([r for r in before.records if r.method == "plain" or r.task == "a"], "two")
    assert change(diff_runs(before, after), "goose", "b", "present").note == "only in the first run"
    other = run([replace(r, prompt=f"new {r.prompt}") for r in before.records], "two")
    assert change(diff_runs(before, other), "goose", ALL_TASKS, "present").note == "no request in common"


def test_differing_settings_are_noted() -> None:
    before = run(measured({"plain": 0.2, "goose": 0.1}))
    after = run(before.records, "two", settings={"max_tokens": 64}, methods=[PLAIN, {**GOOSE, "budget": 16}])
    changes = diff_runs(before, after)
    assert change(changes, "*", ALL_TASKS, "settings").note == "max_tokens 128 -> 64"
    assert change(changes, "goose", "a", "tau").note == "options of the method differ: budget auto -> 16"
    assert change(changes, "plain", "a", "tau").note == ""


# --- outputs ----------------------------------------------------------------------------------------------------------


def judged(*found: str) -> BenchRun:
    records = measured({"goose": 0.1}, tasks="a", prompts=len(found))
    pairs = zip(records, found, strict=True)
    return run([replace(r, lossless=LosslessVerdict(verdict=verdict)) for r, verdict in pairs])


def test_worse_outputs_are_reported_as_change() -> None:
    before, after = judged(IDENTICAL, IDENTICAL, TIE), judged(IDENTICAL, ERROR, TIE)
    found = diff_runs(before, after)[0]
    assert (found.method, found.metric, found.verdict) == ("goose", "lossless", "worse")
    assert (found.before, found.after, found.ratio) == (1, 2, None)
    assert found.note == "identical 2 -> 1, tie 1 -> 1, error 0 -> 1"
    ties_that_are_errors = diff_runs(judged(TIE, IDENTICAL), judged(ERROR, IDENTICAL))[0]
    assert (ties_that_are_errors.metric, ties_that_are_errors.before) == ("lossless", 1)


@pytest.mark.parametrize("after", [(IDENTICAL, IDENTICAL), (IDENTICAL, TIE), (TIE, IDENTICAL)])
def test_outputs_that_are_not_worse_are_not_reported(after: tuple[str, str]) -> None:
    changes = diff_runs(judged(IDENTICAL, TIE), judged(*after))
    assert "lossless" not in {found.metric for found in changes}


def test_a_method_that_fails_now() -> None:
    before = run(measured({"plain": 0.2, "goose": 0.1}))
    after = run([replace(r, error="no memory") if r.method == "goose" else r for r in before.records], "two")
    changes = diff_runs(before, after)
    found = change(changes, "goose", ALL_TASKS, "failed")
    assert (found.verdict, found.before, found.after) == ("worse", 0, 20)
    assert change(changes, "goose", ALL_TASKS, "present").note == "only in the first run"
    assert "failed" not in {c.metric for c in diff_runs(after, before)}


# --- lines ------------------------------------------------------------------------------------------------------------


def telling() -> list[Change]:
    before = run(measured({"plain": 0.2, "goose": 0.1, "pld": 0.1, "sam": 0.1}))
    records = measured({"plain": 0.2, "goose": 0.05, "pld": 0.2, "new": 0.1}, seed=1)
    wrong = replace(records[1], lossless=LosslessVerdict(verdict=ERROR))
    fine = replace(before.records[1], lossless=LosslessVerdict(verdict=IDENTICAL))
    return diff_runs(replace_first(before, fine), replace_first(run(records, "two", settings={"max_tokens": 9}), wrong))


def replace_first(whole: BenchRun, better: RequestRecord) -> BenchRun:
    return whole._replace(records=[better if r.key == better.key else r for r in whole.records])


def test_most_important_rows_come_first() -> None:
    rows = format_changes(telling())
    assert rows[0] == ("method", "task", "figure", "change", "before", "after", "ratio", "99%", "note")
    assert rows[1][:4] == ("goose", "all tasks", "lossless", "worse")
    assert "max_tokens 128 -> 9" in rows[2][-1]
    assert {row[:4] for row in rows[3:5]} == {
        ("goose", "all tasks", "speedup", "faster"),
        ("pld", "all tasks", "speedup", "slower"),
    }
    order = [row[3] == "cannot be compared" for row in rows[1:]]
    assert order == sorted(order)
    assert order.count(True) == 2


def test_omitted_rows_are_counted() -> None:
    changes = telling()
    note = summarize_hidden_changes(changes)
    assert note is not None
    assert note.endswith("more figures of single tasks: same within noise, or too few prompts")
    assert int(note.split()[0]) + len(format_changes(changes)) - 1 == len(changes)


def test_single_task_is_shown_without_changes() -> None:
    one = run(measured({"plain": 0.2, "goose": 0.1}, tasks="a"))
    assert len(format_changes(diff_runs(one, one))) == 1 + 4 + 3
    assert summarize_hidden_changes(diff_runs(one, one)) is None


def test_nothing_in_common() -> None:
    empty = BenchRun("one", manifest(), [])
    assert diff_runs(empty, empty) == []
    assert summarize_hidden_changes([]) == "The runs have nothing in common."


def test_changes_are_json_serializable() -> None:
    content = json.loads(json.dumps([asdict(found) for found in telling()], allow_nan=False))
    assert content[0]["verdict"] == "worse"


@pytest.mark.parametrize("shuffle", [list.reverse, random.Random(3).shuffle])
def test_order_of_records_does_not_matter(shuffle: Callable[[list[RequestRecord]], None]) -> None:
    before, after = measured({"plain": 0.2, "goose": 0.1}), measured({"plain": 0.2, "goose": 0.08}, seed=1)
    mixed = list(after)
    shuffle(mixed)
    assert diff_runs(run(before), run(mixed)) == diff_runs(run(before), run(after))
