"""The file of a datastore: written atomically and memory-mapped.

The format is safetensors: eight bytes with the length of a JSON header, the header (metadata, names, types, shapes,
offsets), then the tensors.
"""

import json
import mmap
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftwood.disk import new_file
from draftwood.errors import DraftwoodError
from draftwood.progress import Progress, report
from draftwood.sources.suffix_array import Int32Array

FORMAT, VERSION = "draftwood-datastore", "1"
_MAX_HEADER = 1 << 24  # bytes
_BLOCK = 1 << 20  # numbers written at a time


class DatastoreError(DraftwoodError):
    """A datastore cannot be found, read or built, or belongs to another model."""


class MappedDatastore(NamedTuple):
    path: Path
    metadata: Mapping[str, str]
    tokens: Int32Array  # [n], in the file
    suffixes: Int32Array  # [n], in the file


def write_file(
    path: Path, tokens: Int32Array, suffixes: Int32Array, metadata: Mapping[str, str], progress: Progress | None = None
) -> None:
    """Write the file atomically. Processes that have an older file of that name open keep the old one."""
    done, total = 0, len(tokens) + len(suffixes)
    with new_file(path) as temporary, temporary.open("wb") as handle:
        handle.write(_header({"tokens": tokens, "suffixes": suffixes}, metadata))
        for array in (tokens, suffixes):
            for start in range(0, len(array), _BLOCK):
                block = array[start : start + _BLOCK].astype("<i4", copy=False)
                handle.write(block.tobytes())
                done += len(block)
                report(progress, f"writing {path.name}", done, total)


def map_file(path: Path) -> MappedDatastore:
    """Map the file. Only the header is read and checked."""
    try:
        with path.open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            header, start = _read_header(path, handle.read(8), handle.read(min(size, _MAX_HEADER)), size)
            metadata = _read_metadata(path, header)
            content = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError as error:
        raise DatastoreError(
            "The datastore does not exist",
            got=path,
            next_step="Build it: draftwood datastore build FILES... --out FILE",
        ) from error
    except OSError as error:
        raise DatastoreError(f"{path} cannot be read", got=error.strerror or error) from error
    arrays = [_tensor(path, header.get(name), content, start) for name in ("tokens", "suffixes")]
    if len(arrays[0]) != len(arrays[1]) or not len(arrays[0]):
        raise damaged(path, "its parts differ in length")
    return MappedDatastore(path, metadata, *arrays)


def damaged(path: Path, why: str) -> DatastoreError:
    return DatastoreError("The datastore is damaged", got=f"{path}: {why}", next_step="Build it again.")


def _header(tensors: Mapping[str, Int32Array], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": FORMAT, "version": VERSION, **metadata}}
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + 4 * len(array)
        entries[name] = {"dtype": "I32", "shape": [len(array)], "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    room = -(-len(text) // 8) * 8  # align the tensors to eight bytes
    return struct.pack("<Q", room) + text.ljust(room)


def _read_header(path: Path, length: bytes, text: bytes, size: int) -> tuple[dict[str, Any], int]:
    """The header and the offset of the tensors."""
    room = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
    try:
        header = json.loads(text[:room]) if 2 <= room <= min(_MAX_HEADER, size - 8) else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise _not_a_datastore(path)
    return header, 8 + room


def _read_metadata(path: Path, header: Mapping[str, Any]) -> dict[str, str]:
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise _not_a_datastore(path)
    if metadata.get("version") != VERSION:
        raise DatastoreError(
            "The datastore has another version",
            got=f"{path}: version {metadata.get('version')}",
            allowed=VERSION,
            next_step="Build it again.",
        )
    return metadata


def _tensor(path: Path, entry: object, content: mmap.mmap, start: int) -> Int32Array:
    """The tensor that a header entry describes; raise if it is not inside the file."""
    fields = entry if isinstance(entry, dict) else {}
    shape, places = _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if fields.get("dtype") != "I32" or (len(shape), len(places)) != (1, 2) or places[1] - places[0] != 4 * shape[0]:
        raise damaged(path, "its header is invalid")
    if start + places[1] > len(content):
        raise damaged(path, f"it is truncated, {len(content):,} of {start + places[1]:,} bytes")
    return np.frombuffer(content, "<i4", shape[0], start + places[0])


def _counts(values: object) -> list[int]:
    """The list if it contains only non-negative integers, else an empty list."""
    good = isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
    return values if good else []  # type: ignore[return-value]


def _not_a_datastore(path: Path) -> DatastoreError:
    return DatastoreError(
        "This file is not a datastore", got=path, next_step="Build one: draftwood datastore build FILES... --out FILE"
    )
