"""Reads documents for a datastore from text files, JSON lines and folders, as token ids."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from draftwood.errors import DraftwoodError
from draftwood.models import BUILT_IN, resolve
from draftwood.progress import Progress, report
from draftwood.text import ByteTokenizer, TextCodec, Tokenizer

SUFFIXES = (".txt", ".md", ".py", ".jsonl")  # read from a folder; a file given by name may have any suffix
FIELDS = (
    "text",
    "content",
    "completion",
    "response",
    "output",
    "turns",
    "messages",
)  # fields of a JSON line that may hold the text


class CorpusError(DraftwoodError):
    """A corpus cannot be found, read or parsed."""


def load_codec(model: str, progress: Progress | None = None) -> TextCodec:
    """Load a model's tokenizer without its weights."""
    return ByteTokenizer() if model == BUILT_IN else Tokenizer.from_folder(resolve(model, progress).path)


def find_files(paths: Sequence[str | Path]) -> list[Path]:
    """Find the files, and those in folders by name, without duplicates and hidden files."""
    found: dict[Path, Path] = {}
    for path in map(Path, paths):
        inside = _list_files(path) if path.is_dir() else [path]
        if not inside:
            raise CorpusError(
                "The folder contains no text files", got=path, allowed=[f"*{suffix}" for suffix in SUFFIXES]
            )
        found.update((file.resolve(), file) for file in inside)
    if not found:
        raise CorpusError("There are no files to read", next_step="Give text files, .jsonl files or folders.")
    return list(found.values())


def token_documents(
    codec: TextCodec, files: Sequence[Path], field: str | None = None, progress: Progress | None = None
) -> Iterator[list[int]]:
    """Yield the documents as token ids, without special tokens."""
    for text in documents(files, field, progress):
        yield codec.encode(text, add_special=False)


def documents(files: Sequence[Path], field: str | None = None, progress: Progress | None = None) -> Iterator[str]:
    """Yield one document per text file, or per line of a ``.jsonl`` file; empty documents are skipped.

    A line of JSON is a string, or an object with the text in ``field``, else in the first of ``FIELDS`` it has. Turns
    and messages are joined by an empty line.
    """
    total = sum(_size(file) for file in files)
    done = 0
    for file in files:
        texts = _read_json_lines(file, field) if file.suffix == ".jsonl" else _read_text_file(file)
        for num_bytes, text in texts:
            report(progress, "reading texts", done, total)  # before the document is processed
            done += num_bytes
            if text.strip():
                yield text
    report(progress, "reading texts", total, total)


def has_lone_surrogate(text: str) -> bool:
    """Whether the text has a lone surrogate, which JSON allows and tokenizers reject."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def _list_files(folder: Path) -> list[Path]:
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(place, n) for n in sorted(names) if not n.startswith(".") and n.endswith(SUFFIXES)]
    return found


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:
        raise _read_error(file, error) from error


def _read_text_file(file: Path) -> Iterator[tuple[int, str]]:
    try:
        content = file.read_bytes()
    except OSError as error:
        raise _read_error(file, error) from error
    yield len(content), _decode(content, str(file)).replace("\r\n", "\n")


def _read_json_lines(file: Path, field: str | None) -> Iterator[tuple[int, str]]:
    try:
        with file.open("rb") as handle:
            for number, line in enumerate(handle, start=1):
                place = f"{file}, line {number}"
                text = _decode(line, place).strip()
                yield len(line), _parse_line(text, field, place) if text else ""
    except OSError as error:
        raise _read_error(file, error) from error


def _decode(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorpusError(f"{place} is not valid UTF-8", got=error.reason) from error


def _parse_line(line: str, field: str | None, place: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{place} is not valid JSON", got=error) from error
    if isinstance(entry, str):
        return _check_unicode(entry, place)
    fields = entry if isinstance(entry, Mapping) else {}
    for name in FIELDS if field is None else (field,):
        text = _join_text(fields.get(name))
        if text is not None:
            return _check_unicode(text, place)
    raise CorpusError(
        f"{place} has no text" if field is None else f"{place} has no text in the field {field!r}",
        got=f"the fields {', '.join(fields)}" if fields else line[:80],
        allowed=FIELDS if field is None else "a string, a list of strings, or messages with content",
        next_step="Name the field that holds the text: --field NAME",
    )


def _join_text(value: Any) -> str | None:
    """Join a string, a list of strings, or the contents of messages; None for anything else."""
    if isinstance(value, str):
        return value
    entries: list[Any] = value if isinstance(value, list) else []
    parts: list[Any] = [entry.get("content") if isinstance(entry, Mapping) else entry for entry in entries]
    return "\n\n".join(parts) if parts and all(isinstance(part, str) for part in parts) else None


def _check_unicode(text: str, place: str) -> str:
    if has_lone_surrogate(text):
        raise CorpusError(f"{place} is not valid Unicode", got=ascii(text)[:80])
    return text


def _read_error(file: Path, error: OSError) -> CorpusError:
    return CorpusError(f"{file} cannot be read", got=error.strerror or error)
