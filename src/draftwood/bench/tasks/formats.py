"""Reads rows of prompt files: JSON lines, JSON and Parquet. Each row has its location for error messages."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from draftwood.bench.tasks.layouts import Row, find_layout
from draftwood.errors import MissingExtraError, PromptError

EXTENSIONS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")  # in order of preference


def file_stem(path: str | Path) -> str:
    """Return the name of a prompt file without its extension; empty if it is not a prompt file."""
    name = Path(path).name
    return next((name[: -len(extension)] for extension in EXTENSIONS if name.lower().endswith(extension)), "")


def read_rows(path: Path, name: str | None = None) -> Iterator[tuple[str, Row]]:
    """Yield the rows of a file with their locations; ``name`` replaces the path in these."""
    name = name or str(path)
    if path.name.lower().endswith(".parquet"):
        return _parquet_rows(path, name)
    lines = _read_lines(path, name)
    is_lines = path.name.lower().endswith((".jsonl", ".jsonl.gz"))
    return parse_lines(lines, name) if is_lines else _json_rows(lines, name)


def parse_lines(lines: Iterable[str], name: str) -> Iterator[tuple[str, Row]]:
    """Parse JSON lines; empty lines are skipped."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            place = f"{name}, line {number}"
            yield place, _check_object(_parse_json(line, place), place)


def _read_lines(path: Path, name: str) -> Iterator[str]:
    is_packed = path.name.lower().endswith(".gz")
    try:
        # Split at newlines only: texts may contain other line separators.
        with gzip.open(path, "rb") if is_packed else path.open("rb") as handle:
            for number, line in enumerate(handle):
                yield line.decode("utf-8-sig" if number == 0 else "utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is not valid UTF-8", got=error.reason) from error
    except (OSError, EOFError, zlib.error) as error:
        raise PromptError(f"{name} cannot be read", got=getattr(error, "strerror", None) or error) from error


def _json_rows(lines: Iterable[str], name: str) -> Iterator[tuple[str, Row]]:
    """Parse a list of rows, an object that holds one list, or JSON lines."""
    text = "".join(lines)
    try:
        content: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        first, _, rest = text.strip().partition("\n")
        if rest and not first.rstrip().endswith("}"):  # not JSON lines: an invalid list
            raise PromptError(f"{name} is not valid JSON", got=error) from error
        yield from parse_lines(text.split("\n"), name)
        return
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        only = lists[0] if len(content) == 1 and lists else None
        content = only if only and isinstance(only[0], dict) and find_layout(content) is None else [content]
    if not isinstance(content, list):
        raise PromptError(f"{name} has no rows", got=text[:80], allowed="a list of objects, or one object per line")
    for number, row in enumerate(content, start=1):
        place = f"{name}, entry {number}"
        yield place, _check_object(row, place)


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


def _parse_json(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise PromptError(f"{place} is not valid JSON", got=f"{error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits, deep nesting
        raise PromptError(f"{place} cannot be parsed as JSON", got=error) from error


def _check_object(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise PromptError(
            f"{place} is not an object", got=str(row)[:80], allowed="an object with the fields of a prompt"
        )
    return row
