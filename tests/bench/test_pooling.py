"""Several runs in one summary: which are pooled, which stay separate; the order of runs and records does not matter."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from draftwood.bench.figures.metrics import summarize
from draftwood.bench.figures.summary import ALL_TASKS, Cell
from draftwood.bench.records.run_folder import BenchRun, RequestRecord
from tests.tools.metrics import (
    GOOSE,
    MACHINE,
    MODEL,
    PEER,
    PLAIN,
    manifest,
    record,
    run,
    spine_tree,
    summary,
    traced,
    two_tasks,
    value,
)

# --- pooling ----------------------------------------------------------------------------------------------------------


def many(seed: int, prompts: int = 12) -> list[RequestRecord]:
    draw = random.Random(seed)
    stats = [traced((spine_tree(), path), draft=0.1 * draw.random(), total=1.0) for path in ([], [1], [1, 2])]
    return [
        record(method, task, str(prompt), draw.randrange(5, 50), draw.uniform(0.1, 3.0), stats=draw.choice(stats))
        for method in ("plain", "goose")
        for task in "ab"
        for prompt in range(prompts)
    ]


def test_order_of_records_does_not_matter() -> None:
    records = many(1)
    shuffled = random.Random(2).sample(records, len(records))
    assert summary(run(shuffled)).cells == summary(run(records)).cells


def test_pooled_runs_are_one_run_with_all_records() -> None:
    records = many(3)
    halves = [[r for r in records if int(r.prompt) % 2 == rest] for rest in (0, 1)]
    group_runs = summary(run(halves[0]), run(halves[1], "two"))
    assert group_runs.runs == ["one", "two"]
    assert group_runs.cells == summary(run(records)).cells
    assert summary(run(halves[1], "two"), run(halves[0])).cells == group_runs.cells


def test_runs_with_equal_names_are_distinct_and_duplicates_count_once() -> None:
    one, other = run(many(4)), run(many(5))
    assert summary(one, one).cells == summary(one).cells
    both = summary(one, other)
    assert both.runs == ["one", "one"]
    assert both.cells["goose", "a"].requests == 24


def test_answers_to_one_prompt_are_resampled_together() -> None:
    """Two rounds of a prompt do not count as two prompts, in one run or in two."""
    slow, fast = record("goose", "a", "1", 10, 10.0), record("goose", "a", "1", 10, 5.0)
    for runs in ([run([slow]), run([fast], "two")], [run([slow, replace(fast, repeat=1)])]):
        cell = summary(*runs).cells["goose", "a"]
        assert cell.tokens_per_second == pytest.approx((20 / 15, 1.0, 2.0))  # the times vary, the prompt does not
        assert (cell.prompts, cell.requests) == (1, 2)


# --- which runs belong together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "title"),
    [
        ({"model": {**MODEL, "dtype": "bfloat16"}}, "tiny, bfloat16, Some CPU, temperature 0"),
        ({"model": {**MODEL, "backend": "torch"}}, "tiny, float32, Some CPU, temperature 0, model backend torch"),
        ({"machine": {**MACHINE, "cores": 8}}, "tiny, float32, Some CPU, temperature 0, machine cores 8"),
        ({"settings": {"temperature": 0.6}}, "tiny, float32, Some CPU, temperature 0.6"),
        ({"settings": {"max_tokens": 64}}, "tiny, float32, Some CPU, temperature 0, max_tokens 64"),
        (
            {"model": {**MODEL, "device": "cuda:1"}, "machine": {**MACHINE, "gpus": ["Old GPU", "New GPU"]}},
            "tiny, float32, New GPU, temperature 0",
        ),
    ],
)
def test_runs_with_different_settings_are_not_pooled(other: dict[str, Any], title: str) -> None:
    first, second = summarize([run(two_tasks()), run(two_tasks(), "two", **other)])
    assert (first.runs, second.runs) == (["one"], ["two"])
    assert second.title == title
    assert first.title != second.title
    assert first.cells == second.cells


def test_settings_without_effect_do_not_prevent_pooling() -> None:
    settings = {"seed": 7, "limit": 3, "drafters": ("plain",), "repeats": 2}
    group_runs = summary(run(two_tasks()), run(many(6), "two", settings=settings))
    assert group_runs.title == "tiny, float32, Some CPU, temperature 0"
    assert group_runs.manifest["settings"]["seed"] == 0


def test_settings_read_from_file_are_equal() -> None:
    kept = json.loads(json.dumps(manifest().settings))
    assert kept != manifest().settings  # lists and tuples
    summary(run(two_tasks()), BenchRun("two", replace(manifest(), settings=kept), many(7)))


def test_labels_with_different_options_are_not_pooled() -> None:
    other = {**GOOSE, "budget": 16}
    runs = [
        run([record("goose", "a", "1", 10, 1.0)]),
        run([record("goose", "a", "1", 10, 2.0)], "two", methods=[other, {**PLAIN, "memory": "process"}]),
        run([record("goose", "a", "1", 10, 4.0)], "three", methods=[other]),
    ]
    found = summary(*runs)
    assert [method["label"] for method in found.methods] == ["plain", "goose", "goose (two)"]
    assert found.methods[2]["family"] == "goose (two)"
    assert value(found.cells["goose", "a"].tokens_per_second) == 10.0
    assert value(found.cells["goose (two)", "a"].tokens_per_second) == 20 / 6


def test_methods_come_in_the_order_of_first_appearance() -> None:
    found = summary(run([], methods=[GOOSE]), run([], "two", methods=[PLAIN, GOOSE, PEER]))
    assert [method["label"] for method in found.methods] == ["goose", "plain", "llamacpp"]
    assert found.cells["llamacpp", ALL_TASKS] == Cell(method="llamacpp", task=ALL_TASKS)


def test_records_missing_in_manifest_are_kept() -> None:
    found = summary(run([record("sam", "c", "1", 10, 5.0)]))
    assert found.tasks == ["a", "b", "c"]
    assert value(found.cells["sam", "c"].tokens_per_second) == 2.0


def test_no_runs_give_no_summaries() -> None:
    assert summarize([]) == []
