"""The transition table: which tokens the target thought likely after a token, and after a pair of tokens.

Every row of logits the target computes says what may follow its node, whether the node was accepted or not. The best K
of each go into two tiers: an array by token, and a bounded table by (token before, token). The pair is asked first.
A table of the model's own successors, made once without any context, can fill the first tier from the start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood.sources.rowtable import NOTHING, Arrays, IdRows, RowTable, ScoreRows, check_vocabulary

PAIR_BITS = 32

Successors = tuple[list[int], list[float]]  # tokens and scores, best first
NO_SUCCESSORS: Successors = ([], [])


class SuccessorArrays(NamedTuple):
    """For every token of the vocabulary its K best successors."""

    ids: IdRows  # [V, K]
    scores: ScoreRows  # [V, K] probabilities


class TransitionTable:
    """What one memory knows about which token follows which."""

    def __init__(
        self,
        vocab_size: int,
        width: int = 10,
        *,
        num_pairs: int = 0,
        initial: SuccessorArrays | None = None,
    ) -> None:
        """``num_pairs``: capacity of the second tier, 0 for none. ``initial``: successors known from the start."""
        self.width = width
        self._ids: IdRows = np.empty((vocab_size, width), dtype=np.int32)  # [V, K]
        self._scores: ScoreRows = np.empty((vocab_size, width), dtype=np.float32)  # [V, K]
        self._known = np.zeros(vocab_size, dtype=np.bool_)  # [V]
        self._pairs = RowTable(width, num_pairs) if num_pairs else None
        # Read where it lies: a request that waits should not hold a copy of the whole table.
        self._initial = None if initial is None else SuccessorArrays(initial.ids[:, :width], initial.scores[:, :width])

    @property
    def layout(self) -> str:
        pairs = "" if self._pairs is None else " and of pairs"
        return f"successors of {len(self._known)} tokens{pairs}, {self.width} each"

    @property
    def num_bytes(self) -> int:
        own = self._ids.nbytes + self._scores.nbytes + self._known.nbytes
        return own + (0 if self._pairs is None else self._pairs.num_bytes)

    @property
    def num_pairs(self) -> int:
        return 0 if self._pairs is None else len(self._pairs)

    def learn(self, previous: Sequence[int], tokens: Sequence[int], ids: IdRows, scores: ScoreRows) -> None:
        """Rows [n, K]: what may follow ``tokens[i]`` after ``previous[i]``. Of equal contexts the last row stays."""
        places = np.asarray(tokens)
        self._ids[places] = ids
        self._scores[places] = scores
        self._known[places] = True
        if self._pairs is not None:
            pairs = [before << PAIR_BITS | token for before, token in zip(previous, tokens, strict=True)]
            self._pairs.write(pairs, ids, scores)

    def successors(self, previous: int, token: int) -> Successors:
        """The best successors: of the pair where it is known, else of the token."""
        if self._pairs is not None:
            row = self._pairs.row(previous << PAIR_BITS | token)
            if row is not None:
                return self._pairs.ids[row].tolist(), self._pairs.scores[row].tolist()
        if self._known[token]:
            return self._ids[token].tolist(), self._scores[token].tolist()
        if self._initial is not None and self._initial.ids[token, 0] != NOTHING:
            return self._initial.ids[token].tolist(), self._initial.scores[token].tolist()
        return NO_SUCCESSORS

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """What was learned; the successors known from the start are not."""
        known = np.flatnonzero(self._known)
        single: dict[str, npt.NDArray[np.generic]] = {
            "tokens": known,
            "ids": self._ids[known],
            "scores": self._scores[known],
        }
        return single if self._pairs is None else {**single, **self._pairs.arrays("pairs")}

    def restore(self, arrays: Arrays) -> None:
        for name in ("tokens", "ids", "pairs.ids"):
            if name in arrays:
                check_vocabulary(name, arrays, len(self._known))
        known = arrays["tokens"]
        self._ids[known] = arrays["ids"]
        self._scores[known] = arrays["scores"]
        self._known[known] = True
        if self._pairs is not None:
            self._pairs.restore("pairs", arrays)
