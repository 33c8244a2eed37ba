"""The prompts of benchmarks: packaged prompts, files in any location, and errors for invalid files."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
from pathlib import Path

import pytest

from draftwood.bench.tasks.formats import file_stem
from draftwood.bench.tasks.layouts import MBPP_TEST, TaskPrompt
from draftwood.bench.tasks.load import ORIGINALS, checksum, find_files, load_tasks
from draftwood.errors import MissingExtraError, OptionError, PromptError
from tests.tools.task import ONE, TWO, lines, put

# The package's own


def test_package_contains_prompts() -> None:
    tasks = load_tasks((), None, None)
    assert [task.name for task in tasks] == ["chat", "code", "edit", "math", "summary"]
    for task in tasks:
        assert [prompt.id for prompt in task.prompts] == [f"{task.name}/{number}" for number in range(1, 9)]
        assert task.source == f"draftwood/bench/prompts/{task.name}.jsonl"
    assert {len(prompt.turns) for prompt in tasks[0].prompts} == {2}
    assert {len(prompt.turns) for task in tasks[1:] for prompt in task.prompts} == {1}
    texts = [turn for task in tasks for prompt in task.prompts for turn in prompt.turns]
    assert len(set(texts)) == len(texts) == 48


def test_summary_prompts_contain_paragraphs() -> None:
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


def test_folder_in_native_format(tmp_path: Path) -> None:
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


def test_tasks_keep_the_requested_order(tmp_path: Path) -> None:
    for name in "abc":
        put(tmp_path / f"{name}.jsonl", lines([ONE]))
    assert [task.name for task in load_tasks(["c", "a", "c"], str(tmp_path), None)] == ["c", "a"]


def test_limit_takes_first_prompts_of_each_task(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", lines([ONE, TWO]))
    (task,) = load_tasks((), str(tmp_path), 1)
    assert [prompt.id for prompt in task.prompts] == ["a/1"]
    assert len(load_tasks((), str(tmp_path), 99)[0].prompts) == 2
    with pytest.raises(OptionError, match="out of range"):
        load_tasks((), str(tmp_path), 0)


def test_checksum_covers_ids_and_turns(tmp_path: Path) -> None:
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
def test_json_variants_are_read(content: str, tmp_path: Path) -> None:
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


# Locations of original files


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
def test_original_files_are_found(path: str, task: str, tmp_path: Path) -> None:
    file = put(tmp_path / path, lines([ONE]))
    assert find_files(tmp_path) == {task: file}


@pytest.mark.parametrize(
    "path", ["gsm8k/train.jsonl", "mt_bench/reference_answer/gpt-4.jsonl", ".hidden/a.jsonl", "train.jsonl", "a.txt"]
)
def test_other_files_are_skipped(path: str, tmp_path: Path) -> None:
    put(tmp_path / path, lines([ONE]))
    with pytest.raises(PromptError, match="no prompt files"):
        load_tasks((), str(tmp_path), None)


def test_folder_or_file_as_single_task(tmp_path: Path) -> None:
    file = put(tmp_path / "mt_bench" / "question.jsonl", lines([ONE]))
    put(tmp_path / "mine" / "test.jsonl", lines([ONE]))
    assert [task.name for task in load_tasks((), str(file.parent), None)] == ["mt_bench"]
    assert [task.name for task in load_tasks((), str(file), None)] == ["mt_bench"]
    assert [task.name for task in load_tasks((), str(tmp_path / "mine"), None)] == ["mine"]
    assert [task.name for task in load_tasks((), str(put(tmp_path / "own.jsonl", lines([ONE]))), None)] == ["own"]


def test_nearest_of_several_task_files_is_used(tmp_path: Path) -> None:
    deep = put(tmp_path / "eagle" / "data" / "humaneval" / "question.jsonl", lines([ONE]))
    assert find_files(tmp_path) == {"humaneval": deep}
    packed = put(tmp_path / "HumanEval.jsonl.gz", lines([ONE]))
    assert find_files(tmp_path) == {"humaneval": packed}
    plain = put(tmp_path / "humaneval.jsonl", lines([ONE]))
    put(tmp_path / "openai_humaneval.jsonl", lines([ONE]))
    assert find_files(tmp_path) == {"humaneval": plain}


def test_original_names_are_unique_to_a_task() -> None:
    names = [name for names in ORIGINALS.values() for name in names]
    assert len(set(names)) == len(names)
    assert all(task in names for task, names in ORIGINALS.items())


@pytest.mark.parametrize(
    ("name", "stem"),
    [("a.jsonl", "a"), ("a.b.json.gz", "a.b"), ("A.JSONL.GZ", "A"), ("a.gz", ""), ("a.csv", ""), ("jsonl", "")],
)
def test_stems(name: str, stem: str) -> None:
    assert file_stem(name) == stem


# Errors


def test_unknown_task_error_lists_available_tasks(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"got: maths\n  allowed: chat, code, edit, math, summary\n  Did you mean 'math'\?"
    ):
        load_tasks(["maths"], None, None)
    with pytest.raises(OptionError, match="is not bundled"):
        load_tasks(["humaneval"], None, None)
    put(tmp_path / "humaneval.jsonl", lines([ONE]))
    with pytest.raises(OptionError, match="Did you mean 'humaneval'"):
        load_tasks(["Human-Eval"], str(tmp_path), None)
    with pytest.raises(OptionError, match="allowed: humaneval"):
        load_tasks(["chat"], str(tmp_path / "humaneval.jsonl"), None)


def test_missing_paths_are_reported(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"No prompts found\n  got: .*nowhere"):
        load_tasks((), str(tmp_path / "nowhere"), None)
    with pytest.raises(PromptError, match="no prompt files"):
        load_tasks((), str(tmp_path), None)
    with pytest.raises(PromptError, match="not a prompt file"):
        load_tasks((), str(put(tmp_path / "a.csv", "x")), None)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", lines([ONE]) + "\n{broken\n", r"a\.jsonl, line 3 is not valid JSON"),
        ("a.jsonl.gz", lines([ONE]) + "{broken\n", r"a\.jsonl\.gz, line 2 is not valid JSON"),
        ("a.jsonl", lines([ONE, ["x"]]), r"a\.jsonl, line 2 is not an object"),
        ("a.jsonl", lines([ONE, {"answer": 1, "n": 2}]), r"line 2 has no known layout\n  got: the fields answer, n\n"),
        ("a.jsonl", lines([{"turns": []}]), r"line 1 has an empty prompt"),
        ("a.jsonl", lines([{"turns": ["Hi", "  "]}]), r"line 1 has an empty prompt"),
        ("a.jsonl", lines([{"turns": "Hi"}]), r"line 1 has no known layout"),
        ("a.jsonl", lines([{"messages": [{"role": "assistant", "content": "Hi"}]}]), r"line 1 has an empty prompt"),
        ("a.jsonl", '{"turns": ["\\ud83d"]}', r"line 1 is not valid Unicode\n  got: .*ud83d"),
        ("a.jsonl", lines([ONE]) + "[" * 100_000, r"a\.jsonl, line 2 cannot be parsed as JSON"),
        ("a.json", "[" * 100_000, r"a\.json, line 1 cannot be parsed as JSON"),
        ("a.json", json.dumps([ONE, {}]), r"a\.json, entry 2 has no known layout\n  got: the fields \(none\)"),
        ("a.json", "[\n{},\n{broken}\n]", r"a\.json is not valid JSON\n  got: .*line 3"),
        ("a.json", "7", r"a\.json has no rows"),
        ("a.jsonl", "", r"The task a has no prompts\n  got: .*a\.jsonl"),
        ("a.json", "[]", r"The task a has no prompts"),
        ("a.jsonl", "\n \n", r"The task a has no prompts"),
    ],
)
def test_invalid_files_are_reported_with_line(name: str, content: str, message: str, tmp_path: Path) -> None:
    put(tmp_path / name, content)
    with pytest.raises(PromptError, match=message):
        load_tasks((), str(tmp_path), None)


def test_rejects_non_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(PromptError, match=r"a\.jsonl is not valid UTF-8"):
        load_tasks((), str(tmp_path), None)
    packed = gzip.compress(lines([ONE] * 50).encode())
    for content in (b"no gzip", packed[:-12], packed[:20] + b"\0" * 30 + packed[50:]):
        (tmp_path / "b.jsonl.gz").write_bytes(content)
        with pytest.raises(PromptError, match=r"b\.jsonl\.gz (cannot be read|.*not valid JSON|is not valid UTF-8)"):
            load_tasks(["b"], str(tmp_path), None)


def test_a_broken_file_does_not_stop_other_tasks(tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", lines([ONE]))
    put(tmp_path / "b.jsonl", "{broken")
    assert [task.name for task in load_tasks(["a"], str(tmp_path), None)] == ["a"]


# The real datasets, if available


@pytest.mark.skipif("DRAFTWOOD_BENCH_DATA" not in os.environ, reason="DRAFTWOOD_BENCH_DATA names no folder")
def test_the_sets_of_the_papers() -> None:
    tasks = {task.name: task for task in load_tasks((), os.environ["DRAFTWOOD_BENCH_DATA"], None)}
    assert set(tasks) >= set(ORIGINALS)
    assert {len(prompt.turns) for prompt in tasks["mt_bench"].prompts} == {2}
    assert [prompt.id for prompt in tasks["mbpp"].prompts] == [f"mbpp/{number}" for number in MBPP_TEST]
    assert all(prompt.category for prompt in tasks["spec_bench"].prompts)
    assert all(prompt.turns[0].startswith("Summarize: ") for prompt in tasks["cnn_dm"].prompts)
