"""The prompts of benchmarks: our own, those of files in their own formats, and what is said of broken ones."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.bench.formats import stem_of
from draftwood.bench.layouts import MBPP_TEST, TaskPrompt, prompts_of
from draftwood.bench.tasks import ORIGINALS, checksum, find_files, load_tasks
from draftwood.errors import MissingExtraError, OptionError, PromptError


def lines(rows: Iterable[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def put(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content.encode()))
    else:
        path.write_text(content, encoding="utf-8")
    return path


def turns_of(row: dict[str, Any]) -> tuple[str, ...]:
    (prompt,) = prompts_of([("here", row)], "some")
    return prompt.turns


ONE = {"id": "a/1", "task": "a", "turns": ["What is 1 + 1?", "And 2 + 2?"], "category": "sums"}
TWO = {"id": "a/2", "task": "a", "turns": ["Ein größeres Beispiel\u2028 mit Zeilentrenner"]}


# The package's own


def test_the_package_has_prompts_of_its_own() -> None:
    tasks = load_tasks((), None, None)
    assert [task.name for task in tasks] == ["chat", "code", "edit", "math", "summary"]
    for task in tasks:
        assert [prompt.id for prompt in task.prompts] == [f"{task.name}/{number}" for number in range(1, 9)]
        assert task.source == f"draftwood/bench/prompts/{task.name}.jsonl"
    assert {len(prompt.turns) for prompt in tasks[0].prompts} == {2}
    assert {len(prompt.turns) for task in tasks[1:] for prompt in task.prompts} == {1}
    texts = [turn for task in tasks for prompt in task.prompts for turn in prompt.turns]
    assert len(set(texts)) == len(texts) == 48


def test_summaries_are_asked_of_paragraphs() -> None:
    (task,) = load_tasks(["summary"], None, None)
    for prompt in task.prompts:
        instruction, paragraph = prompt.turns[0].split("\n\n")
        assert 120 <= len(paragraph.split()) <= 200
        assert len(instruction.split()) < 15


def test_code_in_our_prompts_is_python() -> None:
    for name in ("code", "edit"):
        (task,) = load_tasks([name], None, None)
        blocks = [
            block for prompt in task.prompts for block in re.findall(r"```python\n(.*?)```", prompt.turns[0], re.S)
        ]
        assert len(blocks) >= 3
        for block in blocks:
            compile(block, name, "exec")


# Folders and files


def test_a_folder_in_our_own_format(tmp_path: Path) -> None:
    put(tmp_path / "b.jsonl", lines([TWO]))
    put(tmp_path / "a.jsonl", lines([ONE]) + "\n  \n" + lines([TWO]))
    seen: list[tuple[str, int, int]] = []
    first, second = load_tasks((), str(tmp_path), None, lambda *step: seen.append(step))
    assert (first.name, second.name) == ("a", "b")
    assert first.prompts == [
        TaskPrompt(id="a/1", turns=("What is 1 + 1?", "And 2 + 2?"), category="sums"),
        TaskPrompt(id="a/2", turns=(TWO["turns"][0],), category=None),
    ]
    assert first.source == str(tmp_path / "a.jsonl")
    assert seen[0] == ("reading prompts", 0, 2)
    assert seen[-1] == ("reading prompts", 2, 2)


def test_tasks_come_in_the_order_they_are_named_in(tmp_path: Path) -> None:
    for name in "abc":
        put(tmp_path / f"{name}.jsonl", lines([ONE]))
    assert [task.name for task in load_tasks(["c", "a", "c"], str(tmp_path), None)] == ["c", "a"]


def test_the_limit_takes_the_first_of_each_task(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", lines([ONE, TWO]))
    (task,) = load_tasks((), str(tmp_path), 1)
    assert [prompt.id for prompt in task.prompts] == ["a/1"]
    assert len(load_tasks((), str(tmp_path), 99)[0].prompts) == 2
    with pytest.raises(OptionError, match="out of range"):
        load_tasks((), str(tmp_path), 0)


def test_the_checksum_is_over_what_is_asked(tmp_path: Path) -> None:
    put(tmp_path / "x" / "a.jsonl", lines([ONE, TWO]))
    put(tmp_path / "y" / "a.json", json.dumps([ONE | {"category": "other", "reference": "2"}, TWO], indent=2))
    put(tmp_path / "z" / "a.jsonl", lines([TWO, ONE]))
    x, y, z = (load_tasks((), str(tmp_path / name), None)[0].sha256 for name in "xyz")
    assert x == y != z
    by_hand = '[["a/1",["What is 1 + 1?","And 2 + 2?"]]]'
    assert load_tasks((), str(tmp_path / "x"), 1)[0].sha256 == hashlib.sha256(by_hand.encode()).hexdigest()
    one_turn = TaskPrompt(id="p", turns=("a\nb",))
    assert checksum([one_turn]) != checksum([TaskPrompt(id="p", turns=("a", "b"))])


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.json.gz"])
def test_every_kind_of_file_gives_the_same_prompts(name: str, tmp_path: Path) -> None:
    is_lines = ".jsonl" in name
    put(tmp_path / name, lines([ONE, TWO]) if is_lines else json.dumps([ONE, TWO], indent=1))
    (task,) = load_tasks((), str(tmp_path), None)
    assert task.name == "a"
    assert [prompt.id for prompt in task.prompts] == ["a/1", "a/2"]


@pytest.mark.parametrize(
    "content",
    [
        lines([ONE, TWO]),
        json.dumps({"data": [ONE, TWO]}),
        "\ufeff" + json.dumps([ONE, TWO]),
        "\r\n".join(map(json.dumps, [ONE, TWO])),
    ],
    ids=["lines", "wrapped", "mark", "crlf"],
)
def test_json_is_read_as_it_is_found(content: str, tmp_path: Path) -> None:
    path = put(tmp_path / "a.json", content)
    assert [prompt.id for prompt in load_tasks((), str(path), None)[0].prompts] == ["a/1", "a/2"]


def test_json_with_a_single_object_is_one_prompt(tmp_path: Path) -> None:
    path = put(tmp_path / "a.json", json.dumps({"messages": [{"role": "user", "content": "Hi"}]}))
    assert load_tasks((), str(path), None)[0].prompts == [TaskPrompt(id="a/0", turns=("Hi",))]


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [{"question": "How many?", "answer": "#### 4"}, {"question": "How much?", "answer": "#### 5"}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "gsm8k.parquet")
    (task,) = load_tasks((), str(tmp_path), None)
    assert task.prompts == [
        TaskPrompt(id="gsm8k/0", turns=("How many?",)),
        TaskPrompt(id="gsm8k/1", turns=("How much?",)),
    ]
    (tmp_path / "gsm8k.parquet").write_bytes(b"PAR1 no table")
    with pytest.raises(PromptError, match=r"gsm8k\.parquet cannot be read"):
        load_tasks((), str(tmp_path), None)


def test_parquet_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    put(tmp_path / "a.parquet", "PAR1")
    with pytest.raises(MissingExtraError, match=r"draftwood\[bench\]"):
        load_tasks((), str(tmp_path), None)


# Where originals lie


@pytest.mark.parametrize(
    ("path", "task"),
    [
        ("mt_bench.jsonl", "mt_bench"),
        ("MT-Bench/question.jsonl", "mt_bench"),
        ("fastchat/llm_judge/data/mt_bench/question.jsonl", "mt_bench"),
        ("HumanEval.jsonl.gz", "humaneval"),
        ("human-eval/data/HumanEval.jsonl.gz", "humaneval"),
        ("eagle/data/humaneval/question.jsonl", "humaneval"),
        ("eagle/data/sum/question.jsonl", "cnn_dm"),
        ("eagle/data/qa/question.jsonl", "qa"),
        ("sanitized-mbpp.json", "mbpp"),
        ("ClassEval/data/ClassEval_data.json", "classeval"),
        ("gsm8k/test.jsonl", "gsm8k"),
        ("grade_school_math/data/test.jsonl", "gsm8k"),
        ("gsm8k/main/test-00000-of-00001.parquet", "gsm8k"),
        ("alpaca_data.json", "alpaca"),
        ("Spec-Bench/data/spec_bench/question.jsonl", "spec_bench"),
        ("aime24/test.jsonl", "aime24"),
        ("aime_2024_problems.parquet", "aime24"),
        ("code_generation_lite/test6.jsonl", "livecodebench"),
        ("vicuna_bench/question.jsonl", "vicuna_bench"),
        ("My Own.jsonl", "My Own"),
    ],
)
def test_originals_are_found_where_they_lie(path: str, task: str, tmp_path: Path) -> None:
    file = put(tmp_path / path, lines([ONE]))
    assert find_files(tmp_path) == {task: file}


@pytest.mark.parametrize(
    "path", ["gsm8k/train.jsonl", "mt_bench/reference_answer/gpt-4.jsonl", ".hidden/a.jsonl", "train.jsonl", "a.txt"]
)
def test_what_is_no_prompt_file_is_left_out(path: str, tmp_path: Path) -> None:
    put(tmp_path / path, lines([ONE]))
    with pytest.raises(PromptError, match="no prompt files"):
        load_tasks((), str(tmp_path), None)


def test_a_folder_or_file_that_is_one_task(tmp_path: Path) -> None:
    file = put(tmp_path / "mt_bench" / "question.jsonl", lines([ONE]))
    put(tmp_path / "mine" / "test.jsonl", lines([ONE]))
    assert [task.name for task in load_tasks((), str(file.parent), None)] == ["mt_bench"]
    assert [task.name for task in load_tasks((), str(file), None)] == ["mt_bench"]
    assert [task.name for task in load_tasks((), str(tmp_path / "mine"), None)] == ["mine"]
    assert [task.name for task in load_tasks((), str(put(tmp_path / "own.jsonl", lines([ONE]))), None)] == ["own"]


def test_of_several_files_for_a_task_the_nearest_is_taken(tmp_path: Path) -> None:
    deep = put(tmp_path / "eagle" / "data" / "humaneval" / "question.jsonl", lines([ONE]))
    assert find_files(tmp_path) == {"humaneval": deep}
    packed = put(tmp_path / "HumanEval.jsonl.gz", lines([ONE]))
    assert find_files(tmp_path) == {"humaneval": packed}
    plain = put(tmp_path / "humaneval.jsonl", lines([ONE]))
    put(tmp_path / "openai_humaneval.jsonl", lines([ONE]))
    assert find_files(tmp_path) == {"humaneval": plain}


def test_no_name_stands_for_two_tasks() -> None:
    names = [name for names in ORIGINALS.values() for name in names]
    assert len(set(names)) == len(names)
    assert all(task in names for task, names in ORIGINALS.items())


@pytest.mark.parametrize(
    ("name", "stem"),
    [("a.jsonl", "a"), ("a.b.json.gz", "a.b"), ("A.JSONL.GZ", "A"), ("a.gz", ""), ("a.csv", ""), ("jsonl", "")],
)
def test_stems(name: str, stem: str) -> None:
    assert stem_of(name) == stem


# Layouts


def test_each_set_asks_in_its_own_way() -> None:
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


def test_code_is_asked_for_with_the_raw_prompt() -> None:
    stub = 'def one():\n    """Return 1."""\n'
    (turn,) = turns_of({"task_id": "HumanEval/0", "prompt": stub, "entry_point": "one", "canonical_solution": "..."})
    instruction, raw = turn.split("\n\n", 1)
    assert raw == stub
    assert "Python function" in instruction
    (turn,) = turns_of({"task_id": "ClassEval_0", "skeleton": "class Stack:\n    pass", "class_name": "Stack"})
    assert turn.endswith("\n\nclass Stack:\n    pass")
    assert "class Stack" in turn.split("\n\n")[0]


@pytest.mark.parametrize("field", ["text", "prompt"])
def test_mbpp_is_asked_with_its_tests(field: str) -> None:
    row = {"task_id": 11, field: "Write f.", "code": "...", "test_list": ["assert f(1) == 2", "assert f(2) == 3"]}
    (turn,) = turns_of(row)
    assert turn.startswith("Write f.")
    assert turn.endswith("\n\nassert f(1) == 2\nassert f(2) == 3")


def test_livecodebench_with_and_without_code_to_start_from() -> None:
    row = {"question_id": "abc1_a", "question_content": "Add two numbers.", "starter_code": "", "difficulty": "easy"}
    (prompt,) = prompts_of([("here", row)], "livecodebench")
    assert (prompt.id, prompt.category) == ("abc1_a", "easy")
    assert "Add two numbers." in prompt.turns[0]
    assert "standard input" in prompt.turns[0]
    (turn,) = turns_of(row | {"starter_code": "class Solution:\n    ..."})
    assert "```python\nclass Solution:\n    ...\n```" in turn
    assert "standard input" not in turn


def test_of_conversations_the_user_is_heard() -> None:
    said = [("system", "Be short."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")]
    expected = ("Be short.\n\nHi", "Bye")
    assert turns_of({"messages": [{"role": who, "content": what} for who, what in said]}) == expected
    shared = [("system", "Be short."), ("human", "Hi"), ("gpt", "Hello"), ("human", "Bye")]
    assert turns_of({"id": "x_0", "conversations": [{"from": who, "value": what} for who, what in shared]}) == expected


def mbpp_rows(ids: Iterable[int]) -> list[tuple[str, dict[str, Any]]]:
    return [("here", {"task_id": n, "text": f"Write f{n}.", "test_list": [f"assert f{n}()"]}) for n in ids]


def test_of_the_whole_mbpp_the_test_split_is_taken() -> None:
    prompts = prompts_of(mbpp_rows(range(1, 975)), "mbpp")
    assert [prompt.id for prompt in prompts] == [f"mbpp/{number}" for number in range(11, 511)]
    sanitized = [number for number in range(2, 975) if number % 2 == 0]
    assert len(prompts_of(mbpp_rows(sanitized), "mbpp")) == sum(number in MBPP_TEST for number in sanitized) == 250


@pytest.mark.parametrize("ids", [range(601, 975), range(11, 511), [3, 700]], ids=["train", "test", "chosen"])
def test_any_other_part_of_mbpp_stays_as_it_is(ids: Iterable[int]) -> None:
    assert len(prompts_of(mbpp_rows(ids), "mbpp")) == len(list(ids))


# Ids


def test_ids_are_the_rows_own_or_made_from_the_task() -> None:
    rows = [{"question_id": 81}, {"task_id": "HumanEval/3"}, {"id": "7"}, {}, {"id": ""}, {"id": None, "task_id": 2}]
    prompts = prompts_of([("here", row | {"prompt": "Hi"}) for row in rows], "some")
    assert [prompt.id for prompt in prompts] == ["some/81", "HumanEval/3", "some/7", "some/3", "some/4", "some/2"]


def test_a_second_prompt_of_one_id_gets_a_suffix() -> None:
    rows = [("here", {"id": name, "prompt": "Hi"}) for name in ["a", "a", "a#2", "a"]]
    assert [prompt.id for prompt in prompts_of(rows, "some")] == ["a", "a#2", "a#2#2", "a#3"]


@given(st.lists(st.one_of(st.integers(0, 3), st.sampled_from(["a", "a#2", "a#2#2", "1", "t/1", ""])), max_size=12))
def test_ids_are_unique_and_do_not_depend_on_what_follows(ids: list[int | str]) -> None:
    rows = [("here", {"id": name, "prompt": f"Prompt {index}"}) for index, name in enumerate(ids)]
    prompts = prompts_of(rows, "t")
    assert len({prompt.id for prompt in prompts}) == len(ids)
    assert [prompt.turns for prompt in prompts] == [(f"Prompt {index}",) for index in range(len(ids))]
    for length in range(len(ids)):
        assert prompts_of(rows[:length], "t") == prompts[:length]


# What is wrong


def test_an_unknown_task_is_answered_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"got: maths\n  allowed: chat, code, edit, math, summary\n  Did you mean math\?"
    ):
        load_tasks(["maths"], None, None)
    with pytest.raises(OptionError, match="do not come with the package"):
        load_tasks(["humaneval"], None, None)
    put(tmp_path / "humaneval.jsonl", lines([ONE]))
    with pytest.raises(OptionError, match="Did you mean humaneval"):
        load_tasks(["Human-Eval"], str(tmp_path), None)
    with pytest.raises(OptionError, match="allowed: humaneval"):
        load_tasks(["chat"], str(tmp_path / "humaneval.jsonl"), None)


def test_places_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"no prompts to be found\n  got: .*nowhere"):
        load_tasks((), str(tmp_path / "nowhere"), None)
    with pytest.raises(PromptError, match="no prompt files"):
        load_tasks((), str(tmp_path), None)
    with pytest.raises(PromptError, match="no prompt file"):
        load_tasks((), str(put(tmp_path / "a.csv", "x")), None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", lines([ONE]) + "\n{broken\n", r"a\.jsonl, line 3 is not valid JSON"),
        ("a.jsonl.gz", lines([ONE]) + "{broken\n", r"a\.jsonl\.gz, line 2 is not valid JSON"),
        ("a.jsonl", lines([ONE, ["x"]]), r"a\.jsonl, line 2 is no object"),
        ("a.jsonl", lines([ONE, {"answer": 1, "n": 2}]), r"line 2 has no known layout\n  got: the fields answer, n\n"),
        ("a.jsonl", lines([{"turns": []}]), r"line 1 asks nothing"),
        ("a.jsonl", lines([{"turns": ["Hi", "  "]}]), r"line 1 asks nothing"),
        ("a.jsonl", lines([{"turns": "Hi"}]), r"line 1 has no known layout"),
        ("a.jsonl", lines([{"messages": [{"role": "assistant", "content": "Hi"}]}]), r"line 1 asks nothing"),
        ("a.jsonl", '{"turns": ["\\ud83d"]}', r"line 1 is not valid Unicode\n  got: .*ud83d"),
        ("a.jsonl", lines([ONE]) + "[" * 100_000, r"a\.jsonl, line 2 is no sensible JSON"),
        ("a.json", "[" * 100_000, r"a\.json, line 1 is no sensible JSON"),
        ("a.json", json.dumps([ONE, {}]), r"a\.json, entry 2 has no known layout\n  got: the fields \(none\)"),
        ("a.json", "[\n{},\n{broken}\n]", r"a\.json is not valid JSON\n  got: .*line 3"),
        ("a.json", "7", r"a\.json has no rows"),
        ("a.jsonl", "", r"The task a has no prompts\n  got: .*a\.jsonl"),
        ("a.json", "[]", r"The task a has no prompts"),
        ("a.jsonl", "\n \n", r"The task a has no prompts"),
    ],
)
def test_broken_files_are_named_with_the_place(name: str, content: str, message: str, tmp_path: Path) -> None:
    put(tmp_path / name, content)
    with pytest.raises(PromptError, match=message):
        load_tasks((), str(tmp_path), None)


def test_files_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(PromptError, match=r"a\.jsonl is no UTF-8 text"):
        load_tasks((), str(tmp_path), None)
    packed = gzip.compress(lines([ONE] * 50).encode())
    for content in (b"no gzip", packed[:-12], packed[:20] + b"\0" * 30 + packed[50:]):
        (tmp_path / "b.jsonl.gz").write_bytes(content)
        with pytest.raises(PromptError, match=r"b\.jsonl\.gz (cannot be read|.*not valid JSON|is no UTF-8)"):
            load_tasks(["b"], str(tmp_path), None)


def test_a_broken_file_does_not_stop_other_tasks(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", lines([ONE]))
    put(tmp_path / "b.jsonl", "{broken")
    assert [task.name for task in load_tasks(["a"], str(tmp_path), None)] == ["a"]


# The real sets, where they are


@pytest.mark.skipif("DRAFTWOOD_BENCH_DATA" not in os.environ, reason="DRAFTWOOD_BENCH_DATA names no folder")
def test_the_sets_of_the_papers() -> None:
    tasks = {task.name: task for task in load_tasks((), os.environ["DRAFTWOOD_BENCH_DATA"], None)}
    assert set(tasks) >= set(ORIGINALS)
    assert {len(prompt.turns) for prompt in tasks["mt_bench"].prompts} == {2}
    assert [prompt.id for prompt in tasks["mbpp"].prompts] == [f"mbpp/{number}" for number in MBPP_TEST]
    assert all(prompt.category for prompt in tasks["spec_bench"].prompts)
    assert all(prompt.turns[0].startswith("Summarize: ") for prompt in tasks["cnn_dm"].prompts)
