"""Rows of logits made of recorded ones: what drafters are used to being shown.

Of a row the K best tokens are known. What is left of the probability is spread evenly over all other tokens, so that
the softmax of the row gives the recorded probabilities, to about 1e-6. Softmax does not mind an offset: every row is
moved so that the other tokens stand at 0. One piece of memory then serves all rows, and only K entries of each are
written.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from draftwood.bench.replay.rows import IdRows, LogprobRows

MIN_REST = 1e-7  # probability that the other tokens have together at least


def heights(logprobs: LogprobRows, vocab_size: int) -> LogprobRows:
    """How far each known token stands above the unknown ones, [n, K]: falling along a row, and never 0.

    Rounding must not make equals of two tokens: their order would then be that of their ids.
    """
    exact = logprobs.astype(np.float64)
    rest = np.maximum(1.0 - np.exp(exact).sum(axis=1, keepdims=True), MIN_REST)  # [n, 1]
    above: LogprobRows = (exact - np.log(rest / max(vocab_size - logprobs.shape[1], 1))).astype(np.float32)
    lowest = np.zeros(len(above), np.float32)
    for column in range(above.shape[1] - 1, -1, -1):
        lowest = above[:, column] = np.maximum(above[:, column], np.nextafter(lowest, np.float32(np.inf)))
    return above


class DenseRows:
    """A tensor [n, V] that is lent out, and filled anew each time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._logits = torch.zeros(0, vocab_size)
        self._written: tuple[npt.NDArray[np.int64], IdRows] | None = None  # where: rows, columns

    def lend(self, ids: IdRows, above: LogprobRows) -> torch.Tensor:
        """Logits [n, V] with these heights; whoever had the last ones must be done with them."""
        if len(ids) > len(self._logits):
            self._logits = torch.zeros(len(ids), self._vocab_size)
            self._written = None
        values = self._logits.numpy()
        if self._written is not None:
            values[self._written] = 0.0
        self._written = (np.arange(len(ids))[:, None], ids)
        values[self._written] = above
        return self._logits[: len(ids)]
