"""Planning of a benchmark: parsing of methods and settings, and the order of jobs."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from draftwood.bench.records.methods import check_memories, parse_methods
from draftwood.bench.run.schedule import method_order, schedule
from draftwood.bench.settings import BenchSettings, split_methods
from draftwood.bench.tasks.load import load_tasks
from draftwood.errors import OptionError

# --- the order of jobs ------------------------------------------------------------------------------------------------


def test_methods_rotate() -> None:
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
def test_every_method_follows_every_other_equally_often(count: int) -> None:
    rounds = [method_order(number, count) for number in range(2 * count)]
    assert all(sorted(places) == list(range(count)) for places in rounds)
    follows = Counter(pair for places in rounds for pair in pairwise(places))
    assert follows == {(a, b): 2 for a in range(count) for b in range(count) if a != b}
    assert set(Counter(places[0] for places in rounds).values()) == {2}


def test_batches_contain_every_prompt_once() -> None:
    tasks = load_tasks(["code"], None, 5)
    methods = parse_methods(["plain"], "prompt", [8])
    jobs = schedule(tasks, methods, 2, 1)
    assert [len(job.prompts) for job in jobs] == [2, 2, 1]
    assert [prompt for job in jobs for prompt in job.prompts] == list(tasks[0].prompts)


# --- methods and settings ---------------------------------------------------------------------------------------------


def test_methods_are_parsed() -> None:
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
def test_invalid_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        BenchSettings(**wrong)


def test_memories_that_distort_results_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tables.memory"
    check_memories(parse_methods(["plain", "goose:memory=process"], "request", [8]), 1)
    check_memories(parse_methods(["plain", "goose", "recycling"], "prompt", [8]), 2)
    check_memories(parse_methods(["plain", "goose"], str(file), [8]), 1)  # plain decoding has no memory
    with pytest.raises(OptionError, match="copy its own answers"):
        check_memories(parse_methods(["plain", "goose:memory=process"], "request", [8]), 2)
    with pytest.raises(OptionError, match="in the same file"):
        check_memories(parse_methods(["goose", "recycling"], str(file), [8]), 1)
    with pytest.raises(OptionError, match="in the same file"):
        check_memories(parse_methods(["goose"], str(file), [8, 16]), 1)
