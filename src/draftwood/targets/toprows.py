"""The best few entries of many rows of logits, as a record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_TOP_K = 64  # MOST_LEADERS in toprows.h: the kernels look for one entry after the other, which is for small k


class TopRows(NamedTuple):
    """The k best entries of n rows of logits."""

    ids: npt.NDArray[np.int32]  # [n, k] best first, ties towards the lower id
    logits: npt.NDArray[np.float32]  # [n, k]
    log_total: npt.NDArray[np.float32]  # [n] log of the sum of exp(logits) over the whole row

    @classmethod
    def from_words(cls, words: npt.NDArray[np.int32]) -> TopRows:
        """From 32-bit words [n, 2k + 1], as which the three travel together: ids, logits, log_total."""
        k = words.shape[1] // 2
        floats = words[:, k:].view(np.float32)
        return cls(words[:, :k], floats[:, :k], floats[:, k]).first(k)

    def at(self, rows: slice | Sequence[int]) -> TopRows:
        """Some of the rows, in that order."""
        index = rows if isinstance(rows, slice) else np.asarray(rows, np.intp)  # once for the three
        return TopRows(self.ids[index], self.logits[index], self.log_total[index])

    def first(self, k: int) -> TopRows:
        """The best k of each row."""
        if k == self.ids.shape[1] and self.ids.flags.c_contiguous and self.logits.flags.c_contiguous:
            return self
        contiguous = np.ascontiguousarray
        return TopRows(contiguous(self.ids[:, :k]), contiguous(self.logits[:, :k]), contiguous(self.log_total))

    def probs(self) -> npt.NDArray[np.float32]:
        """Their probabilities [n, k] under the softmax of the whole row; zeros in a row that has no finite total."""
        logits, shift = self.logits, self.log_total
        if not math.isfinite(sum(shift.tolist())):
            finite = np.isfinite(shift)
            logits = np.where(finite[:, None], logits, np.float32(0.0))
            shift = np.where(finite, shift, np.float32(np.inf))
        probs: npt.NDArray[np.float32] = np.exp(logits - shift[:, None])
        return probs
