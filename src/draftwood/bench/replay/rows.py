"""The target's top tokens at every context that a run visited, on one text and off it.

A *context* is a position of the text, or another context extended by a token that the text does not have there (a
rejected node). The contexts form a tree, and each is identified by its parent and a label: ``(ON_TEXT, position)`` or
``(parent's row, token)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

ON_TEXT = -1  # as parent: the label is a position of the text

IdRows = npt.NDArray[np.int32]
LogprobRows = npt.NDArray[np.float32]


class RowArrays(NamedTuple):
    """The contexts of one text as arrays, parents before their children."""

    parents: npt.NDArray[np.int32]  # [R] a row, or ON_TEXT
    labels: npt.NDArray[np.int32]  # [R] a token, or a position
    ids: IdRows  # [R, K] the target's top tokens, best first
    logprobs: LogprobRows  # [R, K]


class RowStore:
    """The contexts of one text with the target's top K tokens."""

    def __init__(self, width: int) -> None:
        self.width = width
        self._row_of: dict[tuple[int, int], int] = {}
        self._ids: list[IdRows] = []
        self._logprobs: list[LogprobRows] = []

    @classmethod
    def of(cls, arrays: RowArrays) -> RowStore:
        store = cls(arrays.ids.shape[1])
        keys = zip(arrays.parents.tolist(), arrays.labels.tolist(), strict=True)
        store._row_of = {key: row for row, key in enumerate(keys)}
        if len(store._row_of) != len(arrays.ids):
            raise ValueError("a context has two rows")
        store._ids, store._logprobs = [arrays.ids], [arrays.logprobs]
        return store

    def __len__(self) -> int:
        return len(self._row_of)

    def find(self, parent: int, label: int) -> int | None:
        return self._row_of.get((parent, label))

    def add(self, contexts: Sequence[tuple[int, int]], ids: IdRows, logprobs: LogprobRows) -> list[int]:
        """Add contexts that are new, with their ``ids [n, K]`` and ``logprobs``; return the rows of all.

        A parent that is itself in ``contexts`` is given as ``-2 - index``, since it may have no row yet.
        """
        rows: list[int] = []
        fresh: list[int] = []
        for index, (parent, label) in enumerate(contexts):
            key = (parent if parent >= ON_TEXT else rows[-2 - parent], label)
            row = self._row_of.get(key)
            if row is None:
                row = self._row_of[key] = len(self._row_of)
                fresh.append(index)
            rows.append(row)
        if fresh:
            self._ids.append(np.ascontiguousarray(ids[fresh], np.int32))
            self._logprobs.append(np.ascontiguousarray(logprobs[fresh], np.float32))
        return rows

    def merge(self, other: RowStore) -> None:
        """Add the contexts of another store of the same text."""
        arrays = other.arrays()
        contexts = [
            (parent if parent == ON_TEXT else -2 - parent, label)
            for parent, label in zip(arrays.parents.tolist(), arrays.labels.tolist(), strict=True)
        ]
        self.add(contexts, arrays.ids, arrays.logprobs)

    def arrays(self) -> RowArrays:
        """Return all rows in order of insertion."""
        keys = np.array(list(self._row_of), np.int32).reshape(-1, 2)
        if len(self._ids) != 1:
            self._ids = [np.concatenate([np.empty((0, self.width), np.int32), *self._ids])]
            self._logprobs = [np.concatenate([np.empty((0, self.width), np.float32), *self._logprobs])]
        return RowArrays(keys[:, 0].copy(), keys[:, 1].copy(), self._ids[0], self._logprobs[0])
