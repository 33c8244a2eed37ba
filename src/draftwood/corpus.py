"""Texts for a datastore: documents out of text files, JSON lines and folders, as the token ids of a model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwood.errors import DraftwoodError
from draftwood.models import BUILT_IN, resolve
from draftwood.progress import Progress, report
from draftwood.text import ByteTokenizer, TextCodec, Tokenizer

SUFFIXES = (".txt", ".md", ".py", ".jsonl")  # what is taken from a folder; a file that is named may be called anything
FIELDS = ("text", "content", "completion", "response", "output", "turns", "messages")  # where JSON lines keep a text


class CorpusError(DraftwoodError):
    """Texts cannot be found, read or understood."""


def load_codec(model: str, progress: Progress | None = None) -> TextCodec:
    """A model's tokenizer without its weights in memory."""
    return ByteTokenizer() if model == BUILT_IN else Tokenizer.from_folder(resolve(model, progress).path)


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """The files, and those inside the folders in the order of their names; none twice, hidden ones left out."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        inside = _files_in(path) if path.is_dir() else [path]
        if not inside:
            raise CorpusError("The folder has no texts", got=path, allowed=[f"*{suffix}" for suffix in SUFFIXES])
        found.update((file.resolve(), file) for file in inside)
    if not found:
        raise CorpusError("There are no files to read", next_step="Name text files, .jsonl files or folders.")
    return list(found.values())


def token_documents(
    codec: TextCodec, files: Sequence[Path], field: str | None = None, progress: Progress | None = None
) -> Iterator[list[int]]:
    """The documents of the files as token ids, without what a model expects around a prompt."""
    for text in documents(files, field, progress):
        yield codec.encode(text, add_special=False)


def documents(files: Sequence[Path], field: str | None = None, progress: Progress | None = None) -> Iterator[str]:
    """One document a text file, one a line of a ``.jsonl`` file; empty ones are left out.

    A line of JSON is a text, or an object that keeps one in ``field``, else in the first of ``FIELDS`` it has. Turns
    and messages are joined by an empty line.
    """
    total = sum(_size(file) for file in files)
    done = 0
    for file in files:
        texts = _json_lines(file, field) if file.suffix == ".jsonl" else _whole_text(file)
        for num_bytes, text in texts:
            report(progress, "reading texts", done, total)  # before the bar is full
            done += num_bytes
            if text.strip():
                yield text
    report(progress, "reading texts", total, total)


def has_half_letters(text: str) -> bool:
    """JSON can spell half a letter (a lone surrogate), which no tokenizer takes."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _files_in(folder: Path) -> list[Path]:
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(place, n) for n in sorted(names) if not n.startswith(".") and n.endswith(SUFFIXES)]
    return found


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise _unreadable(file, error) from error


def _whole_text(file: Path) -> Iterator[tuple[int, str]]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from error
    yield len(content), _decoded(content, str(file)).replace("\r\n", "\n")


def _json_lines(file: Path, field: str | None) -> Iterator[tuple[int, str]]:
    try:
        with file.open("rb") as handle:
            for number, line in enumerate(handle, start=1):
                place = f"{file}, line {number}"
                text = _decoded(line, place).strip()
                yield len(line), _from_json(text, field, place) if text else ""
    except OSError as error:
        raise _unreadable(file, error) from error


def _decoded(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{place} is no UTF-8 text", got=error.reason) from error


def _from_json(line: str, field: str | None, place: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{place} is not valid JSON", got=error) from error
    if isinstance(entry, str):
        return _whole_letters(entry, place)
    fields = entry if isinstance(entry, Mapping) else {}
    for name in FIELDS if field is None else (field,):
        text = _joined(fields.get(name))
        if text is not None:
            return _whole_letters(text, place)
    raise CorpusError(
        f"{place} has no text" if field is None else f"{place} has no text in the field {field!r}",
        got=f"the fields {', '.join(fields)}" if fields else line[:80],
        allowed=FIELDS if field is None else "a text, a list of texts, or messages with content",
        next_step="Name the field that holds the text: --field NAME",
    )


def _joined(value: Any) -> str | None:
    """A text, several, or the contents of messages; None where it is neither."""
    if isinstance(value, str):
        return value
    entries: list[Any] = value if isinstance(value, list) else []
    parts: list[Any] = [entry.get("content") if isinstance(entry, Mapping) else entry for entry in entries]
    return "\n\n".join(parts) if parts and all(isinstance(part, str) for part in parts) else None


def _whole_letters(text: str, place: str) -> str:
    if has_half_letters(text):
        raise CorpusError(f"{place} is not valid Unicode", got=ascii(text)[:80])
    return text


def _unreadable(file: Path, error: OSError) -> CorpusError:
    return CorpusError(f"{file} cannot be read", got=error.strerror or error)
