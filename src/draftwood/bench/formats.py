"""Prompt files of benchmarks: rows out of JSON lines, JSON and parquet, and what a row of each known set asks.

A row is recognised by its fields, not by the name of its file: whoever has the original file of a benchmark need not
convert it. Where a set holds a task rather than a question (a function to complete, an article to shorten), the
instruction around it is written here.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood.errors import MissingExtraError, PromptError

EXTENSIONS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")  # the first of several files of one name is taken
MBPP_SPLITS = (range(1, 11), range(11, 511), range(511, 601), range(601, 975))  # few-shot, test, validation, train
MBPP_TEST = MBPP_SPLITS[1]

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskPrompt:
    """One conversation to be had with every method: what the user says, turn by turn."""

    id: str  # unique within its task
    turns: tuple[str, ...]
    category: str | None = None


def stem_of(path: str | Path) -> str:
    """The name of a prompt file without its extension; empty where it is none."""
    name = Path(path).name
    return next((name[: -len(extension)] for extension in EXTENSIONS if name.lower().endswith(extension)), "")


# Rows


def read_rows(path: Path, name: str | None = None) -> Iterator[tuple[str, Row]]:
    """The rows of a file, each with the place to name when something is wrong with it; ``name`` is the file's there."""
    name = name or str(path)
    if path.name.lower().endswith(".parquet"):
        return _parquet_rows(path, name)
    lines = _lines(path, name)
    is_lines = path.name.lower().endswith((".jsonl", ".jsonl.gz"))
    return rows_of_lines(lines, name) if is_lines else _json_rows(lines, name)


def rows_of_lines(lines: Iterable[str], name: str) -> Iterator[tuple[str, Row]]:
    """JSON lines; empty ones are left out."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{name}, line {number}"
            yield place, _object(_parsed(line, place), place)


def _lines(path: Path, name: str) -> Iterator[str]:
    is_packed = path.name.lower().endswith(".gz")
    try:
        # Lines end with a newline and nothing else: texts may hold other characters that split a line.
        with gzip.open(path, "rb") if is_packed else path.open("rb") as handle:
            for number, line in enumerate(handle):
                yield line.decode("utf-8-sig" if number == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is no UTF-8 text", got=error.reason) from error
    except (OSError, EOFError, zlib.error) as error:
        raise PromptError(f"{name} cannot be read", got=getattr(error, "strerror", None) or error) from error


def _json_rows(lines: Iterable[str], name: str) -> Iterator[tuple[str, Row]]:
    """A list of rows, an object with one list in it, or JSON lines under another name."""
    text = "".join(lines)
    try:
        content: Any = json.loads(text)
    except ValueError as error:
        first, _, rest = text.strip().partition("\n")
        if rest and not first.rstrip().endswith("}"):  # not one object a line: a list that is broken
            raise PromptError(f"{name} is not valid JSON", got=error) from error
        yield from rows_of_lines(text.split("\n"), name)
        return
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        only = lists[0] if len(content) == 1 and lists else None
        content = only if only and isinstance(only[0], dict) and layout_of(content) is None else [content]
    if not isinstance(content, list):
        raise PromptError(f"{name} has no rows", got=text[:80], allowed="a list of objects, or one object a line")
    for number, row in enumerate(content, start=1):
        place = f"{name}, entry {number}"
        yield place, _object(row, place)


def _parquet_rows(path: Path, name: str) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise MissingExtraError(f"Reading {name}", "pyarrow", "bench") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{name}, row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise PromptError(f"{name} cannot be read", got=error) from error


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise PromptError(f"{place} is not valid JSON", got=f"{error.msg} at column {error.colno}") from error


def _object(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise PromptError(f"{place} is no object", got=str(row)[:80], allowed="an object with the fields of a prompt")
    return row


# Layouts


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How one kind of file writes a prompt down."""

    name: str
    fields: str  # for messages
    fits: Callable[[Row], bool]
    turns: Callable[[Row], list[str]]


def _has(*names: str) -> Callable[[Row], bool]:
    """Whether all these fields are texts."""
    return lambda row: all(isinstance(row.get(name), str) for name in names)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _humaneval(row: Row) -> list[str]:
    return [f"Write out this Python function in full, signature included, as one code block.\n\n{row['prompt']}"]


def _classeval(row: Row) -> list[str]:
    return [f"Write out the Python class {row['class_name']} with every method filled in.\n\n{row['skeleton']}"]


def _mbpp(row: Row) -> list[str]:
    # The wording is that of the paper (Austin et al., 2021); the sanitized file keeps the text under another name.
    task, tests = row.get("text") or row["prompt"], "\n".join(row["test_list"])
    question = f"You are an expert Python programmer, and here is your task: {task}"
    return [f"{question} Your code should pass these tests:\n\n{tests}"]


def _livecodebench(row: Row) -> list[str]:
    start = row.get("starter_code")
    how = (
        f"Begin with this code and keep its names:\n\n```python\n{start}\n```"
        if isinstance(start, str) and start.strip()
        else "The program reads standard input and writes its answer to standard output."
    )
    return [f"Solve this problem with a Python program, given as one code block.\n\n{row['question_content']}\n\n{how}"]


def _alpaca(row: Row) -> list[str]:
    extra = row.get("input") or row.get("context")  # Dolly's name for it
    return ["\n\n".join(text for text in (row["instruction"], extra) if isinstance(text, str) and text.strip())]


def _said(row: Row) -> list[tuple[str, str]] | None:
    """Who said what, in either way of writing a conversation down."""
    for field, speaker, text in (("messages", "role", "content"), ("conversations", "from", "value")):
        said = row.get(field)
        if isinstance(said, list) and said and all(isinstance(m, dict) for m in said):
            pairs = [(m.get(speaker), m.get(text)) for m in said]
            if all(isinstance(part, str) for pair in pairs for part in pair):
                return pairs
    return None


def _conversation(row: Row) -> list[str]:
    """What the user says; the answers are the model's to give. A system message goes in front of the first turn."""
    said = _said(row) or []
    turns = [text for speaker, text in said if speaker in ("user", "human")]
    rules = [text for speaker, text in said if speaker == "system" and text.strip()]
    return ["\n\n".join([*rules, turns[0]]), *turns[1:]] if turns else []


# The first that fits is taken: those with more or rarer fields come first.
LAYOUTS = (
    Layout(
        name="turns",  # our own, MT-Bench, Spec-Bench, EAGLE's folders
        fields="turns",
        fits=lambda row: _texts(row.get("turns")),
        turns=lambda row: list(row["turns"]),
    ),
    Layout(
        name="prompts",  # MT-Bench on the hub
        fields="prompt (a list)",
        fits=lambda row: _texts(row.get("prompt")),
        turns=lambda row: list(row["prompt"]),
    ),
    Layout(name="humaneval", fields="prompt + entry_point", fits=_has("prompt", "entry_point"), turns=_humaneval),
    Layout(name="classeval", fields="skeleton + class_name", fits=_has("skeleton", "class_name"), turns=_classeval),
    Layout(
        name="mbpp",
        fields="text or prompt + test_list",
        fits=lambda row: _texts(row.get("test_list")) and (_has("text")(row) or _has("prompt")(row)),
        turns=_mbpp,
    ),
    Layout(name="livecodebench", fields="question_content", fits=_has("question_content"), turns=_livecodebench),
    Layout(
        name="cnn_dm",
        fields="article",
        fits=_has("article"),
        turns=lambda row: [f"Summarize: {row['article']}"],
    ),
    Layout(name="alpaca", fields="instruction", fits=_has("instruction"), turns=_alpaca),
    Layout(
        name="conversation",
        fields="messages or conversations",
        fits=lambda row: _said(row) is not None,
        turns=_conversation,
    ),
    Layout(name="gsm8k", fields="question", fits=_has("question"), turns=lambda row: [row["question"]]),
    Layout(name="aime", fields="problem", fits=_has("problem"), turns=lambda row: [row["problem"]]),
    Layout(name="aime", fields="Problem", fits=_has("Problem"), turns=lambda row: [row["Problem"]]),
    Layout(name="prompt", fields="prompt", fits=_has("prompt"), turns=lambda row: [row["prompt"]]),
)
_ID_FIELDS = ("id", "question_id", "task_id", "prompt_id", "ID")
_CATEGORY_FIELDS = ("category", "difficulty")


def layout_of(row: Row) -> Layout | None:
    return next((layout for layout in LAYOUTS if layout.fits(row)), None)


def prompts_of(rows: Iterable[tuple[str, Row]], task: str) -> list[TaskPrompt]:
    """All prompts of a task, in the order of its rows.

    Two rows with one id are two prompts: the later one gets a suffix (``12#2``). Results are kept by id, so one of them
    would be lost otherwise; refusing the file would help nobody, since sets with such rows are in use as they are.
    """
    prompts: list[TaskPrompt] = []
    layouts, taken = set(), set[str]()
    for index, (place, row) in enumerate(rows):
        layout = layout_of(row)
        if layout is None:
            raise PromptError(
                f"{place} has no known layout",
                got=f"the fields {', '.join(map(str, row)) or '(none)'}",
                allowed=dict.fromkeys(layout.fields for layout in LAYOUTS),
                next_step='Write prompts as {"id": ..., "turns": ["..."]}, or leave this task out with --tasks.',
            )
        turns = tuple(layout.turns(row))
        if not turns or not all(turn.strip() for turn in turns):
            raise PromptError(
                f"{place} asks nothing", got=f"turns {list(turns)}"[:80], allowed="turns that are not empty"
            )
        layouts.add(layout.name)
        name = _free(_id(row, task, index), taken)
        taken.add(name)
        prompts.append(TaskPrompt(id=name, turns=turns, category=_category(row)))
    return _mbpp_test_split(prompts) if layouts == {"mbpp"} else prompts


def _id(row: Row, task: str, index: int) -> str:
    """The row's own id; numbers, and rows without one, behind the name of their task."""
    own = next((row[name] for name in _ID_FIELDS if isinstance(row.get(name), (str, int)) and row[name] != ""), index)
    return f"{task}/{own}" if str(own).isdecimal() else str(own)


def _free(name: str, taken: set[str]) -> str:
    count, free = 1, name
    while free in taken:
        count += 1
        free = f"{name}#{count}"
    return free


def _category(row: Row) -> str | None:
    return next((row[name] for name in _CATEGORY_FIELDS if isinstance(row.get(name), str) and row[name]), None)


def _mbpp_test_split(prompts: list[TaskPrompt]) -> list[TaskPrompt]:
    """Of a file with tasks of all four splits, the test split; any other choice of tasks stays as it is."""
    numbers = [int(tail) if (tail := prompt.id.rpartition("/")[2]).isdecimal() else -1 for prompt in prompts]
    if not all(any(number in split for number in numbers) for split in MBPP_SPLITS):
        return prompts
    return [prompt for prompt, number in zip(prompts, numbers, strict=True) if number in MBPP_TEST]
