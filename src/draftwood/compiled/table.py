"""The transition table in C: owns its memory and calls the functions of table.h."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from draftwood.compiled.core import Core, TableRecord, address_of

IdRows = npt.NDArray[np.int32]
ScoreRows = npt.NDArray[np.float32]

NOT_FOUND, BY_TOKEN = -1, -2  # as in table.h; other negative results: initial successors
FIRST_ROWS, FIRST_BITS = 1024, 11  # at least two hash slots per row
MAX_ROWS = 2**31 - 2  # row indices have 32 bits
INVALID = "a verified tree has a token outside the vocabulary or an invalid path"
ROW_BYTES = 8 + 2 * 4  # key and two links, besides the successors


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
        self.width = width
        self.capacity = min(num_pairs, MAX_ROWS)
        self.vocab_size = vocab_size
        self.row_of = np.zeros(vocab_size, dtype=np.int32)  # [V] the token's row plus 1; 0: not seen
        self._record = TableRecord(vocab=vocab_size, width=width, capacity=self.capacity, oldest=-1, latest=-1)
        self.address = ctypes.addressof(self._record)
        self._point_to("row_of", self.row_of)
        if initial is not None:
            self._initial = _align_rows(*initial)
            self._record.initial_ids, self._record.initial_scores = [part.ctypes.data for part in self._initial]
            self._record.initial_stride = self._initial[0].strides[0] // self._initial[0].itemsize
        self._resize_tokens(min(vocab_size, FIRST_ROWS))
        self._resize_rows(min(self.capacity, FIRST_ROWS))
        self._resize_slots(FIRST_BITS if self.capacity else 0)

    @property
    def num_pairs(self) -> int:
        return int(self._record.used)

    @property
    def num_bytes(self) -> int:
        """Only used rows count: untouched memory is not allocated by the system."""
        rows = self.num_pairs * (ROW_BYTES + 8 * self.width) + self._record.num_seen * 8 * self.width
        return self.row_of.nbytes + self._slots.nbytes + int(rows)

    def __call__(self, previous: int, token: int) -> tuple[list[int], list[float]]:
        """The top successors of the pair if known, else of the token."""
        return self.find(previous, token)[1]

    def find(self, previous: int, token: int) -> tuple[int, tuple[list[int], list[float]]]:
        """The top successors, and their tier: 0 of the pair, 1 of the token, 2 initial ones or none."""
        row = self.core.find(self.address, previous, token)
        if row >= 0:
            return 0, (self.pair_ids[row].tolist(), self.pair_scores[row].tolist())
        if row == NOT_FOUND:
            return 2, ([], [])
        if row == BY_TOKEN:
            seen = self.row_of[token] - 1
            return 1, (self.ids[seen].tolist(), self.scores[seen].tolist())
        ids, scores = self._initial
        return 2, (ids[token].tolist(), scores[token].tolist())

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

    def _prepare_rows(self, count: int, ids: IdRows, scores: ScoreRows) -> bool:
        """Check the shapes and reserve memory for ``count`` rows; False if there are none."""
        if ids.shape != (count, self.width) or scores.shape != ids.shape:
            raise ValueError(f"{count} tokens, rows {ids.shape} and {scores.shape}")
        self._reserve(count)
        return count > 0

    # -- all tokens and pairs at once --------------------------------------------------------------------------------

    def token_arrays(self) -> tuple[npt.NDArray[np.int64], IdRows, ScoreRows]:
        """All tokens that have successors, with their rows."""
        tokens = np.flatnonzero(self.row_of)
        rows = self.row_of[tokens] - 1
        return tokens, self.ids[rows], self.scores[rows]

    def restore_tokens(self, tokens: npt.NDArray[Any], ids: npt.NDArray[Any], scores: npt.NDArray[Any]) -> None:
        self._reserve(len(tokens))
        new = np.unique(tokens[self.row_of[tokens] == 0])
        self.row_of[new] = 1 + self._record.num_seen + np.arange(len(new))
        self._record.num_seen += len(new)
        rows = self.row_of[tokens] - 1
        self.ids[rows] = ids
        self.scores[rows] = scores

    def pair_rows(self) -> npt.NDArray[np.int64]:
        """Rows of all pairs, least recently written first."""
        rows = np.empty(self.num_pairs, np.int64)
        self.core.order(self.address, rows.ctypes.data)
        return rows

    def claim(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return rows for the pairs ``previous << 32 | token``, adding new ones; all become the latest."""
        self._reserve(len(keys))
        rows = np.empty(len(keys), np.int64)
        keys = np.ascontiguousarray(keys)
        self.core.claim(self.address, len(keys), keys.ctypes.data, rows.ctypes.data)
        return rows

    # -- memory ------------------------------------------------------------------------------------------------------

    def _reserve(self, more: int) -> None:
        """Reserve memory for ``more`` new tokens and pairs, up to the capacity."""
        record = self._record
        tokens = min(self.vocab_size, record.num_seen + more)
        if tokens > len(self.ids):
            self._resize_tokens(min(self.vocab_size, max(tokens, 2 * len(self.ids))))
        needed = min(record.capacity, record.used + more)
        if needed > len(self.keys):
            self._resize_rows(min(record.capacity, max(needed, 2 * len(self.keys))))
        if needed > 1 << record.bits >> 1:
            self._resize_slots(int(2 * needed - 1).bit_length())

    def _resize_tokens(self, count: int) -> None:
        """Allocate ``count`` rows of tokens and copy the used ones."""
        used, shape, self._record.seen_room = self._record.num_seen, (count, self.width), count
        self.ids: IdRows = self._reallocate("ids", used, shape, np.int32)
        self.scores: ScoreRows = self._reallocate("scores", used, shape, np.float32)

    def _resize_rows(self, count: int) -> None:
        """Likewise, rows of pairs."""
        used, width, self._record.room = self.num_pairs, self.width, count
        self.keys = self._reallocate("keys", used, (count,), np.uint64)
        self.older = self._reallocate("older", used, (count,), np.int32)
        self.later = self._reallocate("later", used, (count,), np.int32)
        self.pair_ids: IdRows = self._reallocate("pair_ids", used, (count, width), np.int32)
        self.pair_scores: ScoreRows = self._reallocate("pair_scores", used, (count, width), np.float32)

    def _reallocate(self, name: str, used: int, shape: tuple[int, ...], kind: type[np.generic]) -> npt.NDArray[Any]:
        new = np.empty(shape, dtype=kind)
        if used:
            new[:used] = getattr(self, name)[:used]
        self._point_to(name, new)
        return new

    def _resize_slots(self, bits: int) -> None:
        self._slots = np.zeros(1 << bits if bits else 0, dtype=np.int32)
        self._record.bits = bits
        self._point_to("slots", self._slots)
        self.core.rehash(self.address)

    def _point_to(self, field: str, memory: npt.NDArray[Any]) -> None:
        """Store the address of writable memory in the record; this object keeps it alive."""
        setattr(self._record, field, address_of(memory) if memory.size else 0)


def reserve_rows(tables: Sequence[CompiledTable], ids: IdRows, scores: ScoreRows) -> array[int]:
    """Makes room for the rows of verified trees in each table, which may be the same one, and returns their
    addresses."""
    shape = ids.shape
    if scores.shape != shape or any(table.width != shape[1] for table in tables):
        raise ValueError(f"rows {shape} and {scores.shape}")
    addresses, find_full, full = array("q", [table.address for table in tables]), tables[0].core.find_full, -1
    start = addresses.buffer_info()[0]
    while (full := find_full(len(tables), start, shape[0], full + 1)) >= 0:
        tables[full]._reserve(shape[0])
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
