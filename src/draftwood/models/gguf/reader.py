"""Reads GGUF files (versions 2 and 3): the metadata and the table of tensors, whose data is read on demand.

A truncated or damaged file is refused before any tensor is read, with a message that says where it is damaged. Data is
read rather than mapped: a file that is cut while it is mapped would end the process.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from draftwood.errors import ModelError
from draftwood.models.gguf.dequantize import Bytes, Floats, block_format, dequantize

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_SMALLEST_PAIR = 8 + 4 + 1  # bytes of a metadata entry: key length, value type, a one-byte value
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8  # bytes of a table entry: name length, dimensions, one size, format, offset
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class TensorEntry(NamedTuple):
    name: str
    shape: tuple[int, ...]  # outermost first, as in torch; the file has the reverse order
    kind: int  # number of the format
    offset: int  # of the first byte in the file
    num_bytes: int

    @property
    def format_name(self) -> str:
        return block_format(self.kind, self.name).name


class GgufFile:
    """An open GGUF file. Use it in a ``with`` block."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ModelError(f"{path} cannot be read", got=error) from error
        try:
            self._state = self._read_state()
            self.size = self._state[0]
            if self.size == 0:
                raise _damaged(path, "it is empty")
            with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as header:
                cursor = _Cursor(path, header)
                num_tensors = self._read_header(cursor)
                self.tensors = self._read_table(cursor, num_tensors)
        except OSError as error:
            self._file.close()
            raise ModelError(f"{path} cannot be read", got=error) from error
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def check_unchanged(self) -> None:
        """Raises an error if the file was written to since it was opened."""
        if self._read_state() != self._state:
            raise ModelError(
                f"{self.path} changed while it was read", next_step="Wait until it is complete, then load it again."
            )

    def _read_state(self) -> tuple[int, int]:
        stat = os.fstat(self._file.fileno())
        return stat.st_size, stat.st_mtime_ns

    def read(self, tensor: TensorEntry) -> Bytes:
        """Reads the blocks of a matrix: [rows, bytes of a row]."""
        return self._copy(tensor.offset, tensor.num_bytes).reshape(tensor.shape[0], -1)

    def finite_floats(self, tensor: TensorEntry, first_row: int = 0, num_rows: int | None = None) -> Floats:
        """Like ``floats``, with a check of the values."""
        values = self.floats(tensor, first_row, num_rows)
        if not np.isfinite(values).all():
            raise not_finite(self.path, tensor.name)
        return values

    def floats(self, tensor: TensorEntry, first_row: int = 0, num_rows: int | None = None) -> Floats:
        """Reads the tensor, or some of its outermost rows, as float32."""
        rows = tensor.shape[0] if num_rows is None else num_rows
        row_bytes = tensor.num_bytes // tensor.shape[0]
        return dequantize(
            tensor.kind, self._copy(tensor.offset + first_row * row_bytes, rows * row_bytes), tensor.name
        ).reshape(rows, *tensor.shape[1:])

    def _copy(self, start: int, length: int) -> Bytes:
        self._file.seek(start)
        content = np.fromfile(self._file, dtype=np.uint8, count=length)
        if content.size != length:
            self.check_unchanged()
            raise _cut_short(self.path, f"{length:,} bytes from byte {start:,} are needed", self.size)
        return content

    def _read_header(self, cursor: _Cursor) -> int:
        if cursor.take(4) != MAGIC:
            raise _damaged(self.path, "it does not start with the bytes GGUF")
        self.version = int(cursor.number("I"))
        if self.version not in VERSIONS:
            swapped = int.from_bytes(self.version.to_bytes(4, "big"), "little") in VERSIONS
            raise ModelError(
                f"{self.path} has an unsupported GGUF version",
                got="a big-endian file" if swapped else self.version,
                allowed=VERSIONS,
            )
        num_tensors = cursor.count(_SMALLEST_TENSOR, "tensors")
        num_pairs = cursor.count(_SMALLEST_PAIR, "metadata entries")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = cursor.string()
            if key in self.metadata:
                raise _damaged(self.path, f"the metadata key {key!r} occurs twice")
            self.metadata[key] = cursor.value(int(cursor.number("I")))
        return num_tensors

    def _read_table(self, cursor: _Cursor, num_tensors: int) -> dict[str, TensorEntry]:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise _damaged(self.path, f"the alignment {alignment} is not a power of two")
        entries = [self._read_entry(cursor, alignment) for _ in range(num_tensors)]
        start = -(-cursor.position // alignment) * alignment
        table: dict[str, TensorEntry] = {}
        end = start
        for entry in sorted(entries, key=lambda item: item.offset):
            placed = entry._replace(offset=start + entry.offset)
            if placed.name in table:
                raise _damaged(self.path, f"the tensor {placed.name} occurs twice")
            if placed.offset < end:
                raise _damaged(self.path, f"the tensor {placed.name} overlaps another one")
            end = placed.offset + placed.num_bytes
            if end > self.size:
                raise _cut_short(self.path, f"the tensor {placed.name} would end at byte {end:,}", self.size)
            table[placed.name] = placed
        return table

    def _read_entry(self, cursor: _Cursor, alignment: int) -> TensorEntry:
        name = cursor.string()
        num_dimensions = int(cursor.number("I"))
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise _damaged(self.path, f"the tensor {name} has {num_dimensions} dimensions")
        shape = tuple(int(cursor.number("Q")) for _ in range(num_dimensions))[::-1]
        kind, offset = int(cursor.number("I")), int(cursor.number("Q"))
        layout = block_format(kind, name)
        if not all(shape) or shape[-1] % layout.elements:
            raise _damaged(self.path, f"the tensor {name} has the shape {list(shape)} in {layout.name}")
        if offset % alignment:
            raise _damaged(self.path, f"the tensor {name} is at {offset}, which is not a multiple of {alignment}")
        num_elements = 1
        for size in shape:
            num_elements *= size
        return TensorEntry(name, shape, kind, offset, num_elements // layout.elements * layout.num_bytes)


class _Cursor:
    """Reads values one after the other; raises an error at the end of a truncated file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.size = path, data, len(data)
        self.position = 0

    def take(self, length: int) -> bytes:
        end = self.position + length
        if end > self.size:
            raise _cut_short(self.path, f"byte {end:,} is needed", self.size)
        piece = self.data[self.position : end]
        self.position = end
        return piece

    def number(self, code: str) -> int | float | bool:
        (found,) = struct.unpack("<" + code, self.take(struct.calcsize(code)))
        value: int | float | bool = found
        return value

    def count(self, smallest: int, what: str) -> int:
        """Reads a count of things that take at least ``smallest`` bytes each, and checks that they fit in the file."""
        found = int(self.number("Q"))
        if found * smallest > self.size:
            raise _damaged(self.path, f"it claims {found:,} {what} in {self.size:,} bytes")
        return found

    def string(self) -> str:
        raw = self.take(self.count(1, "bytes in one string"))
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _damaged(self.path, f"a string before byte {self.position:,} is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        return self.number(self._scalar(kind))

    def _array(self) -> list[Any]:
        kind = int(self.number("I"))
        if kind == _STRING:
            return [self.string() for _ in range(self.count(8, "strings"))]
        code = self._scalar(kind)  # no known file has arrays of arrays
        width = struct.calcsize(code)
        length = self.count(width, "numbers")
        return list(np.frombuffer(self.take(length * width), dtype="<" + code).tolist())

    def _scalar(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise _damaged(self.path, f"value type {kind} before byte {self.position:,} does not exist")
        return _SCALARS[kind]


def not_finite(path: Path, tensor_name: str) -> ModelError:
    return ModelError(
        f"{path}: the tensor {tensor_name} contains values that are not finite",
        next_step="The file is damaged. Fetch it again.",
    )


def _damaged(path: Path, how: str) -> ModelError:
    return ModelError(f"{path} is not a valid GGUF file: {how}", next_step="Fetch the file again.")


def _cut_short(path: Path, what: str, size: int) -> ModelError:
    return ModelError(f"{path} is truncated: {what}", got=f"{size:,} bytes", next_step="Fetch the file again.")
