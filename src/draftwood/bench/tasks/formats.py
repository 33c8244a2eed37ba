"""Prompt files of benchmarks: rows out of JSON lines, JSON and parquet, each with its place for messages."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from draftwood.bench.tasks.layouts import Row, find_layout
from draftwood.errors import MissingExtraError, PromptError

EXTENSIONS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")  # the first of several files of one name is taken


def file_stem(path: str | Path) -> str:
    """The name of a prompt file without its extension; empty where it is none."""
    name = Path(path).name
    return next((name[: -len(extension)] for extension in EXTENSIONS if name.lower().endswith(extension)), "")


def read_rows(path: Path, name: str | None = None) -> Iterator[tuple[str, Row]]:
    """The rows of a file, each with the place to name when something is wrong with it; ``name`` is the file's there."""
    name = name or str(path)
    if path.name.lower().endswith(".parquet"):
        return _parquet_rows(path, name)
    lines = _lines(path, name)
    is_lines = path.name.lower().endswith((".jsonl", ".jsonl.gz"))
    return parse_lines(lines, name) if is_lines else _json_rows(lines, name)


def parse_lines(lines: Iterable[str], name: str) -> Iterator[tuple[str, Row]]:
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
    except (ValueError, RecursionError) as error:
        first, _, rest = text.strip().partition("\n")
        if rest and not first.rstrip().endswith("}"):  # not one object a line: a list that is broken
            raise PromptError(f"{name} is not valid JSON", got=error) from error
        yield from parse_lines(text.split("\n"), name)
        return
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        only = lists[0] if len(content) == 1 and lists else None
        content = only if only and isinstance(only[0], dict) and find_layout(content) is None else [content]
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
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets in brackets
        raise PromptError(f"{place} is no sensible JSON", got=error) from error


def _object(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise PromptError(f"{place} is no object", got=str(row)[:80], allowed="an object with the fields of a prompt")
    return row
