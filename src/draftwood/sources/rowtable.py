"""A bounded table from integers to rows of successors: tokens with scores, best first.

Rows are stored in arrays, so that a whole pass is written in one step and a row costs its bytes and one dictionary
entry. When the table is full, the least recently written entries are evicted.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

NOTHING = -1  # pads short rows
FIRST_ROWS = 1024
ENTRY_BYTES = 140  # approximate cost of a dictionary entry with its key and value
EVICTION_BATCHES = 256  # number of batches in which a full table is renewed once

IdRows = npt.NDArray[np.int32]
ScoreRows = npt.NDArray[np.float32]
Arrays = Mapping[str, npt.NDArray[np.generic]]


def in_vocabulary(ids: npt.NDArray[Any], vocab_size: int) -> bool:
    """Whether all ids are valid tokens or NOTHING; an invalid token would fail a pass for all requests."""
    return bool(((ids >= NOTHING) & (ids < vocab_size)).all())


def check_vocabulary(name: str, arrays: Arrays, vocab_size: int) -> None:
    """Raise if an array that was loaded from a file has invalid ids."""
    if not in_vocabulary(arrays[name], vocab_size):
        raise ValueError(f"{name} contains tokens that the model does not have")


class RowTable:
    def __init__(self, width: int, capacity: int) -> None:
        self.width = width
        self.capacity = capacity
        self._row_of: dict[int, int] = {}  # least recently written first
        self._oldest: dict[int, None] = {}  # next entries to evict, the oldest last
        size = min(FIRST_ROWS, capacity)
        self.ids: IdRows = np.full((size, width), NOTHING, dtype=np.int32)  # [R, K]
        self.scores: ScoreRows = np.zeros((size, width), dtype=np.float32)  # [R, K]
        self.counts = np.zeros(size, dtype=np.int32)  # [R] number of target rows averaged into each

    def __len__(self) -> int:
        return len(self._row_of)

    @staticmethod
    def capacity_within(num_bytes: int, width: int) -> int:
        """The capacity that fits into ``num_bytes``."""
        return max(1, num_bytes // (ENTRY_BYTES + 4 + 8 * width))

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes + self.scores.nbytes + self.counts.nbytes + ENTRY_BYTES * len(self._row_of)

    def row(self, key: int) -> int | None:
        """The index of the key's row in the arrays."""
        return self._row_of.get(key)

    def claim(self, keys: Iterable[int]) -> list[int]:
        """Return the rows of the keys, adding new rows with count 0; all become the latest entries."""
        row_of = self._row_of
        rows = []
        for key in keys:
            row = row_of.pop(key, None)
            if row is None:
                row = self._free_row()
                self.counts[row] = 0
            else:
                self._oldest.pop(key, None)
            row_of[key] = row
            rows.append(row)
        return rows

    def write(self, keys: Sequence[int], ids: IdRows, scores: ScoreRows) -> None:
        """Store rows [n, K]; if a key occurs twice, the later row wins."""
        rows = self.claim(keys)
        self.ids[rows] = ids
        self.scores[rows] = scores
        self.counts[rows] = 1

    def _free_row(self) -> int:
        used = len(self._row_of)
        if used >= self.capacity:
            if not self._oldest:
                # Finding the first entry of a dict skips over all deleted ones, so collect several at once.
                oldest = list(islice(self._row_of, max(1, self.capacity // EVICTION_BATCHES)))
                self._oldest = dict.fromkeys(reversed(oldest))
            return self._row_of.pop(self._oldest.popitem()[0])
        if used >= len(self.ids):
            self._grow(min(self.capacity, 2 * len(self.ids)))
        return used

    def _grow(self, size: int) -> None:
        more = size - len(self.ids)
        self.ids = np.concatenate([self.ids, np.full((more, self.width), NOTHING, dtype=np.int32)])
        self.scores = np.concatenate([self.scores, np.zeros((more, self.width), dtype=np.float32)])
        self.counts = np.concatenate([self.counts, np.zeros(more, dtype=np.int32)])

    def arrays(self, prefix: str) -> dict[str, npt.NDArray[np.generic]]:
        """All entries, oldest first. Keys may exceed 64 bits, so they are split in two."""
        keys, rows = list(self._row_of), list(self._row_of.values())
        low = np.array([key & 0xFFFFFFFFFFFFFFF for key in keys], dtype=np.int64)
        high = np.array([key >> 60 for key in keys], dtype=np.int64)
        return {
            f"{prefix}.key_low": low,
            f"{prefix}.key_high": high,
            f"{prefix}.ids": self.ids[rows],
            f"{prefix}.scores": self.scores[rows],
            f"{prefix}.counts": self.counts[rows],
        }

    def restore(self, prefix: str, arrays: Arrays) -> None:
        """Load what ``arrays`` returned; only the latest entries if the capacity is smaller now."""
        low, high = arrays[f"{prefix}.key_low"].tolist(), arrays[f"{prefix}.key_high"].tolist()
        keys = [(h << 60) | lo for lo, h in zip(low, high, strict=True)][-self.capacity :]
        if not keys:
            return
        if len(keys) > len(self.ids):
            self._grow(len(keys))
        rows = self.claim(keys)
        count = len(keys)
        self.ids[rows] = arrays[f"{prefix}.ids"][-count:]
        self.scores[rows] = arrays[f"{prefix}.scores"][-count:]
        self.counts[rows] = arrays[f"{prefix}.counts"][-count:]
