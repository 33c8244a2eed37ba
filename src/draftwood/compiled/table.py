"""The transition table in C: owns its memory and calls the functions of table.h."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from draftwood.compiled.core import Core, RowsRecord, TableRecord, address_of

IdRows = npt.NDArray[np.int32]
ScoreRows = npt.NDArray[np.float32]
Keys = npt.NDArray[np.uint64]

NOT_FOUND = 3  # as in table.h, which also numbers the tiers before
FIRST_ROWS, FIRST_BITS = 1024, 11  # at least two hash slots per row
MAX_ROWS = 2**31 - 2  # row indices have 32 bits
KEY_BYTES, LINK_BYTES = 8, 2 * 4  # of a row, besides the successors
INVALID = "a verified tree has a token outside the vocabulary or an invalid path"


class CompiledRows:
    """Successors by key. Without memory until the first row."""

    def __init__(self, core: Core, record: RowsRecord, capacity: int, width: int, *, is_bounded: bool) -> None:
        """``is_bounded``: the least recently written rows make room for new ones; else there are never more keys than
        the capacity."""
        self._core, self._record, self._width, self._is_bounded = core, record, width, is_bounded
        record.capacity, record.oldest, record.latest = capacity, -1, -1
        self._address = ctypes.addressof(record)
        self._slots = np.empty(0, np.int32)
        self._allocate(0)

    def __len__(self) -> int:
        return int(self._record.used)

    @property
    def capacity(self) -> int:
        return int(self._record.capacity)

    @property
    def num_bytes(self) -> int:
        """Only used rows count: untouched memory is not allocated by the system."""
        row = KEY_BYTES + 8 * self._width + (LINK_BYTES if self._is_bounded else 0)
        return self._slots.nbytes + len(self) * row

    def order(self) -> npt.NDArray[np.int64]:
        """All rows; if they are bounded, the least recently written first."""
        rows = np.arange(len(self))
        if self._is_bounded:
            self._core.order(self._address, rows.ctypes.data)
        return rows

    def claim(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Return the rows of the keys, adding new ones; all become the latest."""
        self.reserve(len(keys))
        rows = np.empty(len(keys), np.int64)
        if len(keys):
            keys = np.ascontiguousarray(keys)
            self._core.claim(self._address, len(keys), keys.ctypes.data, rows.ctypes.data)
        return rows

    def reserve(self, more: int) -> None:
        """Reserve memory for ``more`` new rows, up to the capacity."""
        record = self._record
        needed = min(record.capacity, record.used + more)
        if needed > record.room:
            self._allocate(min(record.capacity, max(needed, 2 * record.room, FIRST_ROWS)))
        if needed > 1 << record.bits >> 1:
            record.bits = max(int(2 * needed - 1).bit_length(), FIRST_BITS)
            self._slots = np.zeros(1 << record.bits, dtype=np.int32)
            record.slots = address_of(self._slots)
            self._core.rehash(self._address)

    def _allocate(self, count: int) -> None:
        """Allocate ``count`` rows and copy the used ones."""
        width, self._record.room = self._width, count
        self.keys: Keys = self._reallocate("keys", (count,), np.uint64)
        if self._is_bounded:
            self.older = self._reallocate("older", (count,), np.int32)
            self.later = self._reallocate("later", (count,), np.int32)
        self.ids: IdRows = self._reallocate("ids", (count, width), np.int32)
        self.scores: ScoreRows = self._reallocate("scores", (count, width), np.float32)

    def _reallocate(self, name: str, shape: tuple[int, ...], kind: type[np.generic]) -> npt.NDArray[Any]:
        new, used = np.empty(shape, dtype=kind), len(self)
        if used:
            new[:used] = getattr(self, name)[:used]
        if new.size:
            setattr(self._record, name, address_of(new))  # this object keeps the memory alive
        return new


class CompiledTable:
    """Successors by token and, with a capacity for pairs, by pair. Call it to look up successors."""

    def __init__(
        self,
        core: Core,
        vocab_size: int,
        width: int,
        num_pairs: int,
        initial: tuple[IdRows, ScoreRows] | None,  # [V, K]
    ) -> None:
        self.core = core
        self.vocab_size, self.width = vocab_size, width
        self._record = TableRecord(vocab=vocab_size, width=width)
        self.address = ctypes.addressof(self._record)
        self.tokens = CompiledRows(core, self._record.tokens, vocab_size, width, is_bounded=False)
        self.pairs = CompiledRows(core, self._record.pairs, min(num_pairs, MAX_ROWS), width, is_bounded=True)
        if initial is not None:
            self._initial = _align_rows(*initial)
            self._record.initial_ids, self._record.initial_scores = [part.ctypes.data for part in self._initial]
            self._record.initial_stride = self._initial[0].strides[0] // self._initial[0].itemsize

    @property
    def num_pairs(self) -> int:
        return len(self.pairs)

    @property
    def num_bytes(self) -> int:
        return self.tokens.num_bytes + self.pairs.num_bytes

    def __call__(self, previous: int, token: int) -> tuple[list[int], list[float]]:
        """The top successors of the pair if known, else of the token."""
        return self.find(previous, token)[1]

    def find(self, previous: int, token: int) -> tuple[int, tuple[list[int], list[float]]]:
        """The top successors, and their tier: 0 of the pair, 1 of the token, 2 initial ones or none."""
        ids, scores = array("i", bytes(4 * self.width)), array("f", bytes(4 * self.width))
        tier = self.core.find(self.address, previous, token, ids.buffer_info()[0], scores.buffer_info()[0])
        return (2, ([], [])) if tier == NOT_FOUND else (tier, (ids.tolist(), scores.tolist()))

    def learn(self, previous: Sequence[int], tokens: Sequence[int], ids: IdRows, scores: ScoreRows) -> None:
        """Store rows [n, K]: successors of ``tokens[i]`` after ``previous[i]``. For equal contexts the last wins."""
        if len(previous) != len(tokens):
            raise ValueError(f"{len(previous)} and {len(tokens)} tokens, rows {ids.shape}")
        if not self._prepare_rows(len(tokens), ids, scores):
            return
        contexts = array("i", previous), array("i", tokens)
        rows = _contiguous(ids, np.int32), _contiguous(scores, np.float32)
        addresses = (*[part.buffer_info()[0] for part in contexts], *[address_of(part) for part in rows])
        if self.core.learn(self.address, len(tokens), *addresses):
            raise IndexError(f"tokens {min(tokens)} to {max(tokens)} of {self.vocab_size}")

    def learn_tree(
        self,
        before: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        path: Sequence[int],
        ids: IdRows,
        scores: ScoreRows,
    ) -> None:
        """Store rows [N, K] of a tree's nodes, the ``path`` last; ``before`` is the token before the root."""
        if not self._prepare_rows(len(tokens), ids, scores):
            return
        columns = array("i", tokens), array("i", parents), array("i", path)
        rows = _contiguous(ids, np.int32), _contiguous(scores, np.float32)
        own, above, last = [column.buffer_info()[0] for column in columns]
        addresses = last, address_of(rows[0]), address_of(rows[1])
        if self.core.learn_tree(self.address, len(tokens), own, above, before, len(path), *addresses):
            raise IndexError(f"tokens {min(tokens)} to {max(tokens)} of {self.vocab_size}, path {list(path)}")

    def reserve(self, more: int) -> None:
        """Reserve memory for ``more`` new tokens and pairs."""
        self.tokens.reserve(more)
        self.pairs.reserve(more)

    def _prepare_rows(self, count: int, ids: IdRows, scores: ScoreRows) -> bool:
        """Check the shapes and reserve memory for ``count`` rows; False if there are none."""
        if ids.shape != (count, self.width) or scores.shape != ids.shape:
            raise ValueError(f"{count} tokens, rows {ids.shape} and {scores.shape}")
        self.reserve(count)
        return count > 0


def reserve_rows(tables: Sequence[CompiledTable], ids: IdRows, scores: ScoreRows) -> array[int]:
    """Makes room for the rows of verified trees in each table, which may be the same one, and returns their
    addresses."""
    shape = ids.shape
    if scores.shape != shape or {table.width for table in tables} != {shape[1]}:
        raise ValueError(f"rows {shape} and {scores.shape}")
    addresses, find_full, full = array("q", [table.address for table in tables]), tables[0].core.find_full, -1
    start = addresses.buffer_info()[0]
    while (full := find_full(len(tables), start, shape[0], full + 1)) >= 0:
        tables[full].reserve(shape[0])
    return addresses


def contiguous_rows(ids: IdRows, scores: ScoreRows) -> tuple[IdRows, ScoreRows]:
    return _contiguous(ids, np.int32), _contiguous(scores, np.float32)


def _contiguous(rows: npt.NDArray[Any], kind: type[np.generic]) -> npt.NDArray[Any]:
    """The rows as a contiguous, writable array; copied only if necessary."""
    flags = rows.flags
    return rows if rows.dtype == kind and flags.c_contiguous and flags.writeable else np.array(rows, kind, order="C")


def _align_rows(ids: IdRows, scores: ScoreRows) -> tuple[IdRows, ScoreRows]:
    """Both arrays with contiguous entries and equal row strides; copied only if necessary."""
    if ids.dtype == np.int32 and scores.dtype == np.float32 and ids.strides == scores.strides and ids.strides[1] == 4:
        return ids, scores
    return np.ascontiguousarray(ids, np.int32), np.ascontiguousarray(scores, np.float32)
