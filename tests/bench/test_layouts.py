"""Rows of prompt files: the prompt layout of each dataset, and prompt ids."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.bench.tasks.layouts import MBPP_TEST, parse_prompts


def turns_of(row: dict[str, Any]) -> tuple[str, ...]:
    (prompt,) = parse_prompts([("here", row)], "some")
    return prompt.turns


# Layouts


def test_each_dataset_has_its_prompt_layout() -> None:
    assert turns_of({"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}) == (
        "Write.",
        "Rewrite.",
    )
    assert turns_of({"prompt_id": 5, "prompt": ["One", "Two"], "reference": []}) == ("One", "Two")
    assert turns_of({"question": "How many?", "answer": "#### 3"}) == ("How many?",)
    assert turns_of({"ID": "2024-I-1", "Problem": "Find x.", "Answer": 7}) == ("Find x.",)
    assert turns_of({"id": 60, "problem": "Find y.", "answer": "204"}) == ("Find y.",)
    assert turns_of({"article": "It rained.", "highlights": "Rain.", "id": "f00"}) == ("Summarize: It rained.",)
    assert turns_of({"prompt": "Just this"}) == ("Just this",)
    assert turns_of({"instruction": "Shorten.", "input": "A text", "output": "A"}) == ("Shorten.\n\nA text",)
    assert turns_of({"instruction": "Tell.", "input": "", "output": "So"}) == ("Tell.",)
    assert turns_of({"instruction": "Tell.", "context": "Of old"}) == ("Tell.\n\nOf old",)


def test_code_task_uses_the_raw_prompt() -> None:
    stub = 'def one():\n    """Return 1."""\n'
    (turn,) = turns_of({"task_id": "HumanEval/0", "prompt": stub, "entry_point": "one", "canonical_solution": "..."})
    instruction, raw = turn.split("\n\n", 1)
    assert raw == stub
    assert "Python function" in instruction
    (turn,) = turns_of({"task_id": "ClassEval_0", "skeleton": "class Stack:\n    pass", "class_name": "Stack"})
    assert turn.endswith("\n\nclass Stack:\n    pass")
    assert "class Stack" in turn.split("\n\n")[0]


@pytest.mark.parametrize("field", ["text", "prompt"])
def test_mbpp_prompt_contains_its_tests(field: str) -> None:
    row = {"task_id": 11, field: "Write f.", "code": "...", "test_list": ["assert f(1) == 2", "assert f(2) == 3"]}
    (turn,) = turns_of(row)
    assert turn.startswith("Write f.")
    assert turn.endswith("\n\nassert f(1) == 2\nassert f(2) == 3")


def test_livecodebench_with_and_without_starter_code() -> None:
    row = {"question_id": "abc1_a", "question_content": "Add two numbers.", "starter_code": "", "difficulty": "easy"}
    (prompt,) = parse_prompts([("here", row)], "livecodebench")
    assert (prompt.id, prompt.category) == ("abc1_a", "easy")
    assert "Add two numbers." in prompt.turns[0]
    assert "standard input" in prompt.turns[0]
    (turn,) = turns_of(row | {"starter_code": "class Solution:\n    ..."})
    assert "```python\nclass Solution:\n    ...\n```" in turn
    assert "standard input" not in turn


def test_user_turns_of_conversations_become_prompts() -> None:
    said = [("system", "Be short."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")]
    expected = ("Be short.\n\nHi", "Bye")
    assert turns_of({"messages": [{"role": who, "content": what} for who, what in said]}) == expected
    shared = [("system", "Be short."), ("human", "Hi"), ("gpt", "Hello"), ("human", "Bye")]
    assert turns_of({"id": "x_0", "conversations": [{"from": who, "value": what} for who, what in shared]}) == expected


def mbpp_rows(ids: Iterable[int]) -> list[tuple[str, dict[str, Any]]]:
    return [("here", {"task_id": n, "text": f"Write f{n}.", "test_list": [f"assert f{n}()"]}) for n in ids]


def test_full_mbpp_is_reduced_to_its_test_split() -> None:
    prompts = parse_prompts(mbpp_rows(range(1, 975)), "mbpp")
    assert [prompt.id for prompt in prompts] == [f"mbpp/{number}" for number in range(11, 511)]
    sanitized = [number for number in range(2, 975) if number % 2 == 0]
    assert len(parse_prompts(mbpp_rows(sanitized), "mbpp")) == sum(number in MBPP_TEST for number in sanitized) == 250


@pytest.mark.parametrize("ids", [range(601, 975), range(11, 511), [3, 700]], ids=["train", "test", "chosen"])
def test_other_parts_of_mbpp_are_unchanged(ids: Iterable[int]) -> None:
    assert len(parse_prompts(mbpp_rows(ids), "mbpp")) == len(list(ids))


# Ids


def test_ids_come_from_rows_or_task_name() -> None:
    rows = [{"question_id": 81}, {"task_id": "HumanEval/3"}, {"id": "7"}, {}, {"id": ""}, {"id": None, "task_id": 2}]
    prompts = parse_prompts([("here", row | {"prompt": "Hi"}) for row in rows], "some")
    assert [prompt.id for prompt in prompts] == ["some/81", "HumanEval/3", "some/7", "some/3", "some/4", "some/2"]


def test_duplicate_id_gets_suffix() -> None:
    rows = [("here", {"id": name, "prompt": "Hi"}) for name in ["a", "a", "a#2", "a"]]
    assert [prompt.id for prompt in parse_prompts(rows, "some")] == ["a", "a#2", "a#2#2", "a#3"]


@given(st.lists(st.one_of(st.integers(0, 3), st.sampled_from(["a", "a#2", "a#2#2", "1", "t/1", ""])), max_size=12))
def test_ids_are_unique_and_independent_of_later_rows(ids: list[int | str]) -> None:
    rows = [("here", {"id": name, "prompt": f"Prompt {index}"}) for index, name in enumerate(ids)]
    prompts = parse_prompts(rows, "t")
    assert len({prompt.id for prompt in prompts}) == len(ids)
    assert [prompt.turns for prompt in prompts] == [(f"Prompt {index}",) for index in range(len(ids))]
    for length in range(len(ids)):
        assert parse_prompts(rows[:length], "t") == prompts[:length]
