"""Comparison of methods with different labels: two heads in two runs, two methods of one run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from draftwood.bench.figures.diff import diff_runs
from draftwood.bench.figures.pairs import MethodPair, find_pairs
from draftwood.bench.figures.summary import ALL_TASKS, Interval
from draftwood.bench.records.run_folder import BenchRun
from draftwood.errors import OptionError
from tests.tools.metrics import MACHINE, PLAIN, change, measured, record, run

HASS, TALF = "eagle2:head=r/hass/head,budget=60", "eagle2:head=r/talf/head,budget=60"
HEADS = MethodPair(HASS, TALF)


def eagle(label: str, **values: Any) -> dict[str, Any]:
    fixed = {"label": label, "kind": "drafter", "drafter": "eagle2", "memory": "prompt", "budget": 60}
    return {**fixed, "options": {"head": label}, **values}


def two_runs(after: float = 0.08, plain: float = 0.2, **values: Any) -> tuple[BenchRun, BenchRun]:
    """One run with a HASS head, the other with a TALF head and another method."""
    old = measured({"plain": 0.2, HASS: 0.1})
    new = measured({"plain": plain, TALF: after, "pld": 0.3}, seed=1)
    fixed = {"methods": [PLAIN, eagle(TALF)], "started": "2025-01-02T00:00:00Z"}
    return run(old, methods=[PLAIN, eagle(HASS)]), run(new, "two", **{**fixed, **values})


def one_run() -> BenchRun:
    records = measured({"plain": 0.2, HASS: 0.1, TALF: 0.08, "pld": 0.16})
    return run(records, methods=[PLAIN, eagle(HASS), eagle(TALF)])


# --- figures ----------------------------------------------------------------------------------------------------------


def test_two_heads_of_two_runs() -> None:
    before, after = two_runs()
    changes = diff_runs(before, after, [HEADS])
    assert {found.method for found in changes} == {f"{HASS} -> {TALF}"}
    # Four metrics, over all tasks and on two.
    assert len(changes) == 4 * 3
    found = change(changes, HEADS.label, ALL_TASKS, "speedup")
    assert (found.verdict, found.note) == ("faster", "")
    assert found.before == pytest.approx(2.0, rel=0.02)
    assert found.after == pytest.approx(2.5, rel=0.02)
    assert change(changes, HEADS.label, "a", "first_token_ms").after == pytest.approx(80.0)
    assert (
        change(diff_runs(after, before, [MethodPair(TALF, HASS)]), f"{TALF} -> {HASS}", "a", "speedup").verdict
        == "slower"
    )


def test_pair_has_same_figures_as_one_changed_method() -> None:
    """A pair gives the same result as the same records under one label."""
    before, after = two_runs()
    renamed = [
        one._replace(records=[replace(r, method=r.method.replace(name, "head")) for r in one.records])
        for one, name in ((before, HASS), (after, TALF))
    ]
    expected = [replace(found, method=HEADS.label) for found in diff_runs(*renamed) if found.method == "head"]
    assert diff_runs(before, after, [HEADS]) == expected


def test_methods_of_one_run() -> None:
    one = one_run()
    pairs = [HEADS, MethodPair(TALF, "pld"), MethodPair("plain", TALF)]
    changes = diff_runs(one, one, pairs)
    assert {found.method for found in changes} == {pair.label for pair in pairs}
    speeds = [
        [change(changes, pair.label, "a", metric) for pair in pairs] for metric in ("speedup", "tokens_per_second")
    ]
    assert [found.verdict for found in speeds[0]] == ["faster", "slower", "faster"]
    for speedup, speed in zip(*speeds, strict=True):  # of one run: plain is the same on both sides
        assert speedup.ratio is not None
        assert speed.ratio == pytest.approx(speedup.ratio)
    assert speeds[0][2].before == pytest.approx(1.0)
    assert {found.note for found in changes} == {""}


def test_methods_of_one_run_are_comparable_without_plain() -> None:
    one = run(measured({"goose": 0.1, "pld": 0.2}), methods=[])
    changes = diff_runs(one, one, [MethodPair("pld", "goose")])
    assert {found.metric for found in changes} == {"tokens_per_second", "tau", "first_token_ms"}
    assert {found.note for found in changes} == {""}


def test_pair_of_equal_labels_equals_single_label() -> None:
    before, after = two_runs()
    same = [MethodPair("plain", "plain")]
    expected = [found for found in diff_runs(before, after) if found.method == "plain" and found.metric != "present"]
    assert diff_runs(before, after, same) == expected
    assert len(expected) == 3 * 3


def test_only_common_prompts_count() -> None:
    """Of ten prompts one method failed on two and the other lacks three; values of those prompts differ a lot."""
    odd = {"0": 1, "1": 1, "7": 4, "8": 4, "9": 4}  # passes
    old = [record("pld", "a", str(i), 20, 2.0, stats={"cycles": odd.get(str(i), 10)}) for i in range(10)]
    new = [record("goose", "a", str(i), 20, 1.0, stats={"cycles": 5}) for i in range(7)]
    new = [replace(r, error="no memory") if r.prompt in "01" else r for r in new]
    one = run([*old, *new])
    found = change(diff_runs(one, one, [MethodPair("pld", "goose")]), "pld -> goose", "a", "tau")
    assert (found.before, found.after, found.ratio) == (2.0, 4.0, Interval(2.0, 2.0, 2.0))
    assert found.verdict == "higher"
    fewer = run([*old, *new[:6]])
    found = change(diff_runs(fewer, fewer, [MethodPair("pld", "goose")]), "pld -> goose", "a", "tau")
    assert (found.verdict, found.note) == ("cannot be compared", "too few prompts: 4 of 5")


# --- notes ------------------------------------------------------------------------------------------------------------


def test_run_differences_are_noted_for_pairs() -> None:
    changes = diff_runs(*two_runs(plain=0.3, after=0.15, settings={"max_tokens": 64}), [HEADS])
    assert change(changes, "*", ALL_TASKS, "settings").note == "max_tokens 128 -> 64"
    assert change(changes, HEADS.label, "a", "tokens_per_second").note.startswith(
        "machine may differ: plain changed too"
    )
    assert change(changes, HEADS.label, "a", "speedup").verdict == "same within noise"
    other = diff_runs(*two_runs(machine={**MACHINE, "cores": 8}), [HEADS])
    assert change(other, HEADS.label, "a", "tokens_per_second").note == "machine may differ"


def test_different_budget_is_noted_but_not_different_head() -> None:
    methods = [PLAIN, eagle(TALF, budget=16, memory="request")]
    found = change(diff_runs(*two_runs(methods=methods), [HEADS]), HEADS.label, "a", "tau")
    assert found.note == "options of the method differ: budget 60 -> 16, memory prompt -> request"
    plain = change(diff_runs(*two_runs(), [MethodPair("plain", TALF)]), f"plain -> {TALF}", "a", "tau")
    assert plain.note == ""  # plain decoding has neither


def test_failing_method_and_missing_tasks_of_a_pair() -> None:
    one = one_run()
    records = [replace(r, error="no memory") if (r.method, r.task) == (TALF, "b") else r for r in one.records]
    broken = one._replace(records=records)
    changes = diff_runs(broken, broken, [HEADS])
    failed = change(changes, HEADS.label, ALL_TASKS, "failed")
    assert (failed.verdict, failed.before, failed.after) == ("worse", 0, 10)
    assert change(changes, HEADS.label, "b", "present").verdict == "cannot be compared"


# --- labels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (TALF, TALF),
        ("eagle2:head=r/t", TALF),  # a prefix
        ("talf", TALF),  # a substring
        ("goose", "goose"),  # a whole label, although others start with it
        ("goose:", "goose:source=pld"),
        ("pl", "pld"),  # a prefix takes precedence over a substring
    ],
)
def test_a_label_may_be_short(text: str, label: str) -> None:
    labels = ("pld", HASS, TALF, "goose", "goose:source=pld")
    one = run([record(label, "a", "1", 1, 1.0) for label in labels], methods=[])
    assert find_pairs(one, one, [(text, HASS), ("hass", text)]) == [(label, HASS), (HASS, label)]


def test_labels_are_resolved_in_their_own_run() -> None:
    before, after = two_runs()
    assert find_pairs(before, after, [("eagle2", "eagle2")]) == [HEADS]
    with pytest.raises(OptionError) as caught:
        find_pairs(before, after, [("talf", "hass")])
    lines = str(caught.value).splitlines()
    assert lines[0] == "No method matches in the first run (one)"
    assert lines[1:3] == ["  got: 'talf'", f"  allowed: 'plain', '{HASS}'"]
    assert "beginning" in lines[3]
    with pytest.raises(OptionError, match=r"second run \(two\)") as caught:
        find_pairs(before, after, [("hass", "hass")])
    assert caught.value.allowed == ["'plain'", f"'{TALF}'", "'pld'"]


@pytest.mark.parametrize(
    ("text", "labels"), [("eagle", [HASS, TALF]), ("budget=60", [HASS, TALF]), ("pl", ["plain", "pld"])]
)
def test_ambiguous_label_error_lists_candidates(text: str, labels: list[str]) -> None:
    with pytest.raises(OptionError, match="Several methods match in the second run") as caught:
        find_pairs(one_run(), one_run(), [("plain", text)])
    assert caught.value.allowed == [repr(label) for label in labels]


def test_empty_label_matches_no_method() -> None:
    one = run([record("pld", "a", "1", 1, 1.0)], methods=[])
    with pytest.raises(OptionError, match="No method"):
        find_pairs(one, one, [("", "pld")])
