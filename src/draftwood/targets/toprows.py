"""The record of the top k entries of many rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_TOP_K = 64  # of the kernels, which are made for small k; MAX_LEADERS in toprows.h


class TopRows(NamedTuple):
    """The top k entries of n rows of logits."""

    ids: npt.NDArray[np.int32]  # [n, k] best first, ties towards the lower id
    logits: npt.NDArray[np.float32]  # [n, k]
    log_total: npt.NDArray[np.float32]  # [n] log of the sum of exp(logits) over the whole row

    @classmethod
    def from_words(cls, words: npt.NDArray[np.int32]) -> TopRows:
        """Unpacks 32-bit words [n, 2k + 1]: ids, logits, log_total."""
        k = words.shape[1] // 2
        floats = words[:, k:].view(np.float32)
        return cls(words[:, :k], floats[:, :k], floats[:, k]).first(k)

    def at(self, rows: slice | Sequence[int]) -> TopRows:
        """Selects rows."""
        index = rows if isinstance(rows, slice) else np.asarray(rows, np.intp)  # converted once for all three
        return TopRows(self.ids[index], self.logits[index], self.log_total[index])

    def first(self, k: int) -> TopRows:
        """Returns the top k of each row, contiguous."""
        if k == self.ids.shape[1] and self.ids.flags.c_contiguous and self.logits.flags.c_contiguous:
            return self
        contiguous = np.ascontiguousarray
        return TopRows(contiguous(self.ids[:, :k]), contiguous(self.logits[:, :k]), contiguous(self.log_total))

    def renamed(self, names: npt.NDArray[np.int32]) -> TopRows:
        """Returns the rows with ``names[id]`` in place of each id."""
        return self._replace(ids=names[self.ids])

    def probs(self) -> npt.NDArray[np.float32]:
        """Returns their probabilities [n, k] under the softmax of the whole row; zeros if its total is not finite."""
        logits, shift = self.logits, self.log_total
        if not isfinite(np.add.reduce(shift)):  # one call in the usual case: the next pass waits for it
            finite = np.isfinite(shift)
            logits = np.where(finite[:, None], logits, np.float32(0.0))
            shift = np.where(finite, shift, np.float32(np.inf))
        probs: npt.NDArray[np.float32] = np.exp(logits - shift[:, None])
        return probs


class KernelRows(TopRows):
    """Top entries as the CPU kernel finds them: with their probabilities, which take several steps in numpy."""

    _probs: npt.NDArray[np.float32] | None = None  # [n, k]; None after ``_replace``

    @classmethod
    def in_words(cls, words: npt.NDArray[np.int32], rows: int, k: int) -> KernelRows:
        """Views of the memory that the kernel fills: ids, logits, probabilities, log_total."""
        size = 4 * rows * k
        ids, logits = np.ndarray((rows, k), np.int32, words), np.ndarray((rows, k), np.float32, words, size)
        found = cls(ids, logits, np.ndarray(rows, np.float32, words, 3 * size))
        found._probs = np.ndarray((rows, k), np.float32, words, 2 * size)
        return found

    @staticmethod
    def num_words(rows: int, k: int) -> int:
        return rows * (3 * k + 1)

    def at(self, rows: slice | Sequence[int]) -> TopRows:
        index = rows if isinstance(rows, slice) else np.asarray(rows, np.intp)  # a tuple would be one place, not rows
        return self._carry(super().at(rows), None if self._probs is None else self._probs[index])

    def first(self, k: int) -> TopRows:
        found = super().first(k)
        return found if found is self else self._carry(found, None if self._probs is None else self._probs[:, :k])

    def renamed(self, names: npt.NDArray[np.int32]) -> TopRows:
        return self._carry(super().renamed(names), self._probs)

    def probs(self) -> npt.NDArray[np.float32]:
        return super().probs() if self._probs is None else np.ascontiguousarray(self._probs)

    @staticmethod
    def _carry(found: TopRows, probs: npt.NDArray[np.float32] | None) -> TopRows:
        if probs is None:
            return found
        carried = KernelRows(*found)
        carried._probs = probs
        return carried
