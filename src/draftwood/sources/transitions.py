"""The transition table: the target's top predictions after each token and after each pair of tokens.

Every row of logits predicts what may follow its node, whether the node was accepted or not. The top K of each row are
stored in two tiers: an array by token, and a bounded table by (previous token, token), which is looked up first. The
successor table of the model, built once without context, can initialise the first tier.

The tiers exist in Python and in C (compiled/table.h) with identical results. A cycle writes and reads dozens of rows,
so C is used if there is a compiler, and compiled growth reads the tiers directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood.compiled import CompiledTable, load_core
from draftwood.sources.rowtable import NOTHING, Arrays, IdRows, RowTable, ScoreRows, check_vocabulary

PAIR_BITS = 32
KEY_BITS = 60  # low bits of a pair's key in a file; higher bits are stored separately

Successors = tuple[list[int], list[float]]  # tokens and scores, best first
Lookup = Callable[[int, int], Successors]  # by previous token and token
NO_SUCCESSORS: Successors = ([], [])


class SuccessorArrays(NamedTuple):
    """The top K successors of every token of the vocabulary."""

    ids: IdRows  # [V, K]
    scores: ScoreRows  # [V, K] probabilities


class TransitionTable:
    """Top successors by token and by pair of tokens."""

    def __init__(
        self, vocab_size: int, width: int = 10, *, num_pairs: int = 0, initial: SuccessorArrays | None = None
    ) -> None:
        """``num_pairs``: capacity of the second tier, 0 for none. ``initial``: initial successors by token."""
        self.width = width
        self._has_pairs = num_pairs > 0
        # Views, not copies: a queued request should not hold a copy of the whole table.
        known = None if initial is None else SuccessorArrays(initial.ids[:, :width], initial.scores[:, :width])
        if known is not None and not known.ids.shape == known.scores.shape == (vocab_size, width):
            raise ValueError(f"successors {known.ids.shape} and {known.scores.shape} for {vocab_size} tokens")
        self._core, self._tiers_of = load_core(), (vocab_size, width, num_pairs, known)

    @cached_property
    def _tiers(self) -> PythonTiers | CompiledTiers:
        """Made for the first reader: a request of a batch that does not draft needs none."""
        return PythonTiers(*self._tiers_of) if self._core is None else CompiledTiers(self._core, *self._tiers_of)

    @cached_property
    def successors(self) -> Lookup:
        """Of the pair if known, else of the token."""
        return self._tiers.successors

    @cached_property
    def learn(self) -> Callable[[Sequence[int], Sequence[int], IdRows, ScoreRows], None]:
        """Previous, tokens [n]; rows [n, K]."""
        return self._tiers.learn

    @cached_property
    def learn_tree(self) -> Callable[[int, Sequence[int], Sequence[int], Sequence[int], IdRows, ScoreRows], None]:
        """Token before the root; tokens and parents [N]; a path, whose rows are written last; rows [N, K]."""
        return self._tiers.learn_tree

    @property
    def layout(self) -> str:
        pairs = " and of pairs" if self._has_pairs else ""
        return f"successors of {self._tiers.vocab_size} tokens{pairs}, {self.width} each"

    @property
    def num_bytes(self) -> int:
        return self._tiers.num_bytes

    @property
    def num_pairs(self) -> int:
        return self._tiers.num_pairs

    def find(self, previous: int, token: int) -> tuple[int, Successors]:
        """The successors, and the tier that they come from: 0 the pair, 1 the token, 2 the initial ones."""
        return self._tiers.find(previous, token)

    @property
    def compiled(self) -> CompiledTable | None:
        """The table in C; None in Python."""
        return self._tiers if isinstance(self._tiers, CompiledTable) else None

    @property
    def address(self) -> int | None:
        """Of the table in C; None in Python."""
        return self._tiers.address if isinstance(self._tiers, CompiledTable) else None

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """What was learned, without the initial successors."""
        tiers = self._tiers
        tokens, ids, scores = tiers.token_arrays()
        single: dict[str, npt.NDArray[np.generic]] = {"tokens": tokens, "ids": ids, "scores": scores}
        return {**single, **tiers.pair_arrays("pairs")} if self._has_pairs else single

    def restore(self, arrays: Arrays) -> None:
        tiers = self._tiers
        for name in ("tokens", "ids", "pairs.ids"):
            if name in arrays:
                check_vocabulary(name, arrays, tiers.vocab_size)
        if (arrays["tokens"] == NOTHING).any():
            raise ValueError("tokens contains tokens that the model does not have")
        tiers.restore_tokens(arrays["tokens"], arrays["ids"], arrays["scores"])
        if self._has_pairs:
            tiers.restore_pairs("pairs", arrays)


class PythonTiers:
    """Reference implementation: arrays by token, and a bounded table by pair."""

    def __init__(self, vocab_size: int, width: int, num_pairs: int, initial: SuccessorArrays | None) -> None:
        self.vocab_size = vocab_size
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
        """Store rows [n, K]: successors of ``tokens[i]`` after ``previous[i]``. For equal contexts the last wins."""
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
        """Store rows [N, K] of a tree's nodes, the ``path`` last; ``before`` is the token before the root."""
        on_path = set(path)
        nodes = [*(node for node in range(len(tokens)) if node not in on_path), *path]
        previous = [tokens[parents[node]] if node else before for node in nodes]
        self.learn(previous, [tokens[node] for node in nodes], ids[nodes], scores[nodes])

    def successors(self, previous: int, token: int) -> Successors:
        return self.find(previous, token)[1]

    def find(self, previous: int, token: int) -> tuple[int, Successors]:
        row = self._pairs.row(previous << PAIR_BITS | token)
        if row is not None:
            return 0, (self._pairs.ids[row].tolist(), self._pairs.scores[row].tolist())
        if self.known[token]:
            return 1, (self.ids[token].tolist(), self.scores[token].tolist())
        if self._initial is not None and self._initial.ids[token, 0] != NOTHING:
            return 2, (self._initial.ids[token].tolist(), self._initial.scores[token].tolist())
        return 2, NO_SUCCESSORS

    def token_arrays(self) -> tuple[npt.NDArray[np.int64], IdRows, ScoreRows]:
        tokens = np.flatnonzero(self.known)
        return tokens, self.ids[tokens], self.scores[tokens]

    def restore_tokens(self, tokens: npt.NDArray[Any], ids: npt.NDArray[Any], scores: npt.NDArray[Any]) -> None:
        self.ids[tokens] = ids
        self.scores[tokens] = scores
        self.known[tokens] = True

    def pair_arrays(self, prefix: str) -> dict[str, npt.NDArray[np.generic]]:
        return self._pairs.arrays(prefix)

    def restore_pairs(self, prefix: str, arrays: Arrays) -> None:
        self._pairs.restore(prefix, arrays)


class CompiledTiers(CompiledTable):
    """The tiers in C; the file format is that of RowTable."""

    @property
    def successors(self) -> Lookup:
        return self  # callable; compiled growth recognises it by its class

    def token_arrays(self) -> tuple[npt.NDArray[np.int64], IdRows, ScoreRows]:
        rows = np.argsort(self.tokens.keys[: len(self.tokens)])
        return self.tokens.keys[rows].astype(np.int64), self.tokens.ids[rows], self.tokens.scores[rows]

    def restore_tokens(self, tokens: npt.NDArray[Any], ids: npt.NDArray[Any], scores: npt.NDArray[Any]) -> None:
        rows = self.tokens.claim(tokens.astype(np.uint64))
        self.tokens.ids[rows] = ids
        self.tokens.scores[rows] = scores

    def pair_arrays(self, prefix: str) -> dict[str, npt.NDArray[np.generic]]:
        rows = self.pairs.order()
        keys = self.pairs.keys[rows]
        return {
            f"{prefix}.key_low": (keys & np.uint64((1 << KEY_BITS) - 1)).astype(np.int64),
            f"{prefix}.key_high": (keys >> np.uint64(KEY_BITS)).astype(np.int64),
            f"{prefix}.ids": self.pairs.ids[rows],
            f"{prefix}.scores": self.pairs.scores[rows],
            f"{prefix}.counts": np.ones(len(rows), np.int32),  # only the latest row of a pair is kept
        }

    def restore_pairs(self, prefix: str, arrays: Arrays) -> None:
        columns = [arrays[f"{prefix}.{name}"] for name in ("key_low", "key_high", "counts", "ids", "scores")]
        size = len(columns[0])
        if [column.shape for column in columns] != [(size,)] * 3 + [(size, self.width)] * 2:
            raise ValueError(f"{prefix} has columns {[column.shape for column in columns]}")
        low, high, _, ids, scores = [column[-self.pairs.capacity :] for column in columns]
        rows = self.pairs.claim(high.astype(np.uint64) << np.uint64(KEY_BITS) | low.astype(np.uint64))
        self.pairs.ids[rows] = ids
        self.pairs.scores[rows] = scores
