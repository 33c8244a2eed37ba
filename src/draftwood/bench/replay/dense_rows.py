"""Dense logits from recorded rows, as drafters expect them.

The top K tokens of a row are known. The remaining probability is spread evenly over all other tokens, so that the
softmax of the row gives the recorded probabilities, to about 1e-6. Softmax is invariant to an offset, so the other
tokens get logit 0. One buffer then serves all rows, and only K entries per row are written.
"""

import numpy as np
import numpy.typing as npt
import torch

from draftwood.bench.replay.rows import IdRows, LogprobRows

MIN_REST = 1e-7  # minimum total probability of the other tokens


def heights(logprobs: LogprobRows, vocab_size: int) -> LogprobRows:
    """Compute the logits of known tokens relative to the others, [n, K]: strictly decreasing, never 0.

    Rounding must not make two logits equal: the order would then depend on token ids.
    """
    exact = logprobs.astype(np.float64)
    rest = np.maximum(1.0 - np.exp(exact).sum(axis=1, keepdims=True), MIN_REST)  # [n, 1]
    above: LogprobRows = (exact - np.log(rest / max(vocab_size - logprobs.shape[1], 1))).astype(np.float32)
    lowest = np.zeros(len(above), np.float32)
    for column in range(above.shape[1] - 1, -1, -1):
        lowest = above[:, column] = np.maximum(above[:, column], np.nextafter(lowest, np.float32(np.inf)))
    return above


class DenseRows:
    """A reused tensor of logits [n, V]."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._logits = torch.zeros(0, vocab_size)
        self._written: tuple[npt.NDArray[np.int64], IdRows] | None = None  # where: rows, columns

    def fill(self, ids: IdRows, above: LogprobRows) -> torch.Tensor:
        """Return logits [n, V] with these values. Overwrites the tensor returned before."""
        if len(ids) > len(self._logits):
            self._logits = torch.zeros(len(ids), self._vocab_size)
            self._written = None
        values = self._logits.numpy()
        if self._written is not None:
            values[self._written] = 0.0
        self._written = (np.arange(len(ids))[:, None], ids)
        values[self._written] = above
        return self._logits[: len(ids)]
