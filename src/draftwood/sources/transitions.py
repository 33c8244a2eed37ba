"""The transition table: which tokens the target thought likely after a token, and after a pair of tokens.

Every row of logits the target computes says what may follow its node, whether the node was accepted or not. The best K
of each go into two tiers: an array by token, and a bounded table by (token before, token). The pair is asked first.
A table of the model's own successors, made once without any context, can fill the first tier from the start.

The tiers are there twice, in Python and in C (compiled/table.h), and do the same to the last bit. A cycle writes and
reads dozens of rows, so where there is a compiler they are those in C, and growth that is compiled reads them there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood.compiled import CompiledTable, load_core
from draftwood.sources.rowtable import NOTHING, Arrays, IdRows, RowTable, ScoreRows, check_vocabulary

PAIR_BITS = 32
KEY_BITS = 60  # of a pair's number in a file; what is above them stands beside it

Successors = tuple[list[int], list[float]]  # tokens and scores, best first
Lookup = Callable[[int, int], Successors]  # by the token before and the token itself
NO_SUCCESSORS: Successors = ([], [])


class SuccessorArrays(NamedTuple):
    """For every token of the vocabulary its K best successors."""

    ids: IdRows  # [V, K]
    scores: ScoreRows  # [V, K] probabilities


class TransitionTable:
    """What one memory knows about which token follows which."""

    successors: Lookup  # the best successors: of the pair where it is known, else of the token
    learn: Callable[[Sequence[int], Sequence[int], IdRows, ScoreRows], None]  # previous, tokens [n]; rows [n, K]
    # The token before the root, tokens and parents [N], a path of which the rows come last; rows [N, K].
    learn_tree: Callable[[int, Sequence[int], Sequence[int], Sequence[int], IdRows, ScoreRows], None]

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
        self._has_pairs = num_pairs > 0
        # Read where it lies: a request that waits should not hold a copy of the whole table.
        known = None if initial is None else SuccessorArrays(initial.ids[:, :width], initial.scores[:, :width])
        if known is not None and not known.ids.shape == known.scores.shape == (vocab_size, width):
            raise ValueError(f"successors {known.ids.shape} and {known.scores.shape} for {vocab_size} tokens")
        core = load_core()
        self._tiers: PythonTiers | CompiledTiers = (
            PythonTiers(vocab_size, width, num_pairs, known)
            if core is None
            else CompiledTiers(core, vocab_size, width, num_pairs, known)
        )
        self.successors = self._tiers.successors
        self.learn, self.learn_tree = self._tiers.learn, self._tiers.learn_tree

    @property
    def layout(self) -> str:
        pairs = " and of pairs" if self._has_pairs else ""
        return f"successors of {len(self._tiers.known)} tokens{pairs}, {self.width} each"

    @property
    def num_bytes(self) -> int:
        return self._tiers.num_bytes

    @property
    def num_pairs(self) -> int:
        return self._tiers.num_pairs

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """What was learned; the successors known from the start are not."""
        tiers = self._tiers
        known = np.flatnonzero(tiers.known)
        single: dict[str, npt.NDArray[np.generic]] = {
            "tokens": known,
            "ids": tiers.ids[known],
            "scores": tiers.scores[known],
        }
        return {**single, **tiers.pair_arrays("pairs")} if self._has_pairs else single

    def restore(self, arrays: Arrays) -> None:
        tiers = self._tiers
        for name in ("tokens", "ids", "pairs.ids"):
            if name in arrays:
                check_vocabulary(name, arrays, len(tiers.known))
        known = arrays["tokens"]
        tiers.ids[known] = arrays["ids"]
        tiers.scores[known] = arrays["scores"]
        tiers.known[known] = True
        if self._has_pairs:
            tiers.restore_pairs("pairs", arrays)


class PythonTiers:
    """Both tiers as they are meant: arrays by token, and a bounded table by pair."""

    def __init__(self, vocab_size: int, width: int, num_pairs: int, initial: SuccessorArrays | None) -> None:
        self.ids: IdRows = np.empty((vocab_size, width), dtype=np.int32)  # [V, K]
        self.scores: ScoreRows = np.empty((vocab_size, width), dtype=np.float32)  # [V, K]
        self.known = np.zeros(vocab_size, dtype=np.bool_)  # [V]
        self._pairs = RowTable(width, num_pairs)
        self._initial = initial

    @property
    def num_bytes(self) -> int:
        return self.ids.nbytes + self.scores.nbytes + self.known.nbytes + self._pairs.num_bytes

    @property
    def num_pairs(self) -> int:
        return len(self._pairs)

    def learn(self, previous: Sequence[int], tokens: Sequence[int], ids: IdRows, scores: ScoreRows) -> None:
        """Rows [n, K]: what may follow ``tokens[i]`` after ``previous[i]``. Of equal contexts the last row stays."""
        places = np.asarray(tokens, dtype=np.intp)
        self.ids[places] = ids
        self.scores[places] = scores
        self.known[places] = True
        if self._pairs.capacity:
            pairs = [before << PAIR_BITS | token for before, token in zip(previous, tokens, strict=True)]
            self._pairs.write(pairs, ids, scores)

    def learn_tree(
        self,
        before: int,
        tokens: Sequence[int],
        parents: Sequence[int],
        path: Sequence[int],
        ids: IdRows,
        scores: ScoreRows,
    ) -> None:
        """Rows [N, K] of a tree's nodes; ``before`` is the token before the root. Those of the ``path`` come last."""
        on_path = set(path)
        nodes = [*(node for node in range(len(tokens)) if node not in on_path), *path]
        previous = [tokens[parents[node]] if node else before for node in nodes]
        self.learn(previous, [tokens[node] for node in nodes], ids[nodes], scores[nodes])

    def successors(self, previous: int, token: int) -> Successors:
        row = self._pairs.row(previous << PAIR_BITS | token)
        if row is not None:
            return self._pairs.ids[row].tolist(), self._pairs.scores[row].tolist()
        if self.known[token]:
            return self.ids[token].tolist(), self.scores[token].tolist()
        if self._initial is not None and self._initial.ids[token, 0] != NOTHING:
            return self._initial.ids[token].tolist(), self._initial.scores[token].tolist()
        return NO_SUCCESSORS

    def pair_arrays(self, prefix: str) -> dict[str, npt.NDArray[np.generic]]:
        return self._pairs.arrays(prefix)

    def restore_pairs(self, prefix: str, arrays: Arrays) -> None:
        self._pairs.restore(prefix, arrays)


class CompiledTiers(CompiledTable):
    """The tiers in C; files are those of a RowTable."""

    @property
    def successors(self) -> Lookup:
        return self  # asking it is calling it; compiled growth knows it by its class

    def pair_arrays(self, prefix: str) -> dict[str, npt.NDArray[np.generic]]:
        rows = self.pair_rows()
        keys = self.keys[rows]
        return {
            f"{prefix}.key_low": (keys & np.uint64((1 << KEY_BITS) - 1)).astype(np.int64),
            f"{prefix}.key_high": (keys >> np.uint64(KEY_BITS)).astype(np.int64),
            f"{prefix}.ids": self.pair_ids[rows],
            f"{prefix}.scores": self.pair_scores[rows],
            f"{prefix}.counts": np.ones(len(rows), np.int32),  # the latest row of a pair alone
        }

    def restore_pairs(self, prefix: str, arrays: Arrays) -> None:
        columns = [arrays[f"{prefix}.{name}"] for name in ("key_low", "key_high", "counts", "ids", "scores")]
        size = len(columns[0])
        if [column.shape for column in columns] != [(size,)] * 3 + [(size, self.width)] * 2:
            raise ValueError(f"{prefix} has columns {[column.shape for column in columns]}")
        low, high, _, ids, scores = [column[-self.capacity :] for column in columns]
        rows = self.claim(high.astype(np.uint64) << np.uint64(KEY_BITS) | low.astype(np.uint64))
        self.pair_ids[rows] = ids
        self.pair_scores[rows] = scores
