"""N-gram tables: what the target thought of the next token when the last one, two, three or four stood there before.

A row is a distribution over its likeliest tokens: the running average over all times its n-gram was met. The longest
n-gram that is known answers. All sizes lie in one bounded table, so that a pass is averaged in with a few array
operations and memory goes where the text needs it; n-grams that were met longest ago make room.

A *context* is the last tokens packed into one whole number, the latest in the lowest bits. Tokens count from 1 there,
so an n-gram is what the lowest n places of a context hold, and n-grams of different sizes are different numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from draftwood.sources.rowtable import NOTHING, Arrays, IdRows, RowTable, ScoreRows, check_vocabulary

MAX_PROMPTS = 4096  # stretches of prompts that are remembered as read
MAX_KEY_BITS = 120  # what a table can write down
LAST_ID = 2**31 - 2  # so that LAST_ID - NOTHING has 31 bits


class NgramTables:
    """What one memory knows about the tokens after n-grams."""

    def __init__(self, vocab_size: int, max_ngram: int = 4, width: int = 10, *, megabytes: int = 128) -> None:
        self.max_ngram = max_ngram
        self.width = width
        self._vocab_size = vocab_size
        self._bits = vocab_size.bit_length()  # tokens count from 1 to vocab_size
        self._masks = [
            (1 << self._bits * size) - 1 for size in range(max_ngram, -1, -1)
        ]  # longest n-gram first, then 0
        self._table = RowTable(width, RowTable.capacity_within(megabytes << 20, width))
        self._prompts: dict[int, None] = {}  # fingerprints, the oldest first
        assert self._bits * max_ngram <= MAX_KEY_BITS

    # No __len__: an empty memory must not pass for no memory.
    @property
    def num_contexts(self) -> int:
        return len(self._table)

    @property
    def capacity(self) -> int:
        """N-grams there is room for."""
        return self._table.capacity

    @property
    def num_bytes(self) -> int:
        return self._table.num_bytes

    # -- contexts ----------------------------------------------------------------------------------------------------

    def context(self, tokens: Sequence[int]) -> int:
        """The context after these tokens, of which the last few matter."""
        context = 0
        for token in tokens[-self.max_ngram :]:
            context = context << self._bits | (token + 1)
        return context

    def extend_context(self, context: int, token: int) -> int:
        return (context << self._bits | (token + 1)) & self._masks[0]

    def contexts_along(self, before: Sequence[int], tokens: Iterable[int]) -> list[int]:
        """The contexts after each of ``tokens``, which follow ``before``."""
        context = self.context(before)
        contexts = []
        for token in tokens:
            context = self.extend_context(context, token)
            contexts.append(context)
        return contexts

    # -- asking ------------------------------------------------------------------------------------------------------

    def lookup(self, tail: Sequence[int]) -> tuple[list[int], list[float]] | None:
        """Tokens that may follow the last tokens of a text with their probabilities, best first; None if unknown."""
        found, ids, probs = self.rows([self.context(tail)])
        if not found:
            return None
        known = int((probs[0] > 0.0).sum())
        return ids[0, :known].tolist(), probs[0, :known].tolist()

    def rows(self, contexts: Sequence[int]) -> tuple[list[int], IdRows, ScoreRows]:
        """Which of the contexts are known, and the rows [m, K] of these: best first, filled up with probabilities 0."""
        row_of = self._table.row
        masks = self._masks[:-1]
        found, rows = [], []
        for index, context in enumerate(contexts):
            for mask in masks:
                row = row_of(context & mask)
                if row is not None:
                    found.append(index)
                    rows.append(row)
                    break
        places = np.array(rows, dtype=np.intp)
        return found, self._table.ids.take(places, axis=0), self._table.scores.take(places, axis=0)

    # -- learning ----------------------------------------------------------------------------------------------------

    def learn(self, contexts: Sequence[int], ids: IdRows, probs: ScoreRows) -> None:
        """Rows [m, K], best first: what may follow each context. Averaged into all of its n-grams, row after row."""
        keys: list[int] = []
        sources: list[int] = []
        # Longest first, so that the short n-grams, which answer when nothing else does, are the last to make room.
        for mask, shorter in zip(self._masks, self._masks[1:], strict=False):
            # Where the text is shorter than the n-gram, there is none.
            keys += [context & mask for context in contexts if context > shorter]
            sources += [index for index, context in enumerate(contexts) if context > shorter]
        while keys:
            now, again = _first_times(keys)
            chosen = np.array([sources[place] for place in now])
            self._average([keys[place] for place in now], ids.take(chosen, axis=0), probs.take(chosen, axis=0))
            keys, sources = [keys[place] for place in again], [sources[place] for place in again]

    def _average(self, keys: Sequence[int], ids: IdRows, probs: ScoreRows) -> None:
        """stored <- (count * stored + new) / (count + 1), of which the K largest stay. The keys are distinct, and the
        rows [m, K] are used up."""
        table = self._table
        rows = np.array(table.claim(keys))
        counts = table.counts[rows]  # [m]
        known = np.flatnonzero(counts)
        if len(known):
            weights = (1.0 / (counts[known] + 1.0)).astype(np.float32)[:, None]
            stored_ids, stored = table.ids.take(rows[known], axis=0), table.scores.take(rows[known], axis=0)
            ids[known], probs[known] = merge(stored_ids, stored * (1.0 - weights), ids[known], probs[known] * weights)
        table.ids[rows] = np.where(probs > 0.0, ids, NOTHING)
        table.scores[rows] = probs
        table.counts[rows] = counts + 1

    def is_new_prompt(self, tokens: Sequence[int], start: int) -> bool:
        """Whether the stretch of a prompt from ``start`` to the end of ``tokens`` comes here for the first time.

        The samples of one prompt say the same about it, and once is enough.
        """
        read = np.array([start, *tokens], dtype=np.int64).tobytes()
        fingerprint = int.from_bytes(hashlib.blake2b(read, digest_size=8).digest(), "little", signed=True)
        if fingerprint in self._prompts:
            return False
        if len(self._prompts) >= MAX_PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        self._prompts[fingerprint] = None
        return True

    # -- as a memory -------------------------------------------------------------------------------------------------

    @property
    def layout(self) -> str:
        return f"n-grams up to {self.max_ngram}, {self.width} successors, {self._bits} bits a token"

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        return {**self._table.arrays("ngrams"), "prompts": np.array(list(self._prompts), dtype=np.int64)}

    def restore(self, arrays: Arrays) -> None:
        check_vocabulary("ngrams.ids", arrays, self._vocab_size)
        self._table.restore("ngrams", arrays)
        self._prompts = dict.fromkeys(arrays["prompts"].tolist())


def merge(ids: IdRows, probs: ScoreRows, more_ids: IdRows, more_probs: ScoreRows) -> tuple[IdRows, ScoreRows]:
    """The sums of two times m distributions, given by their largest entries [m, K]; the K largest of them, best first.

    What is absent counts as 0; what token stands beside a sum of 0 means nothing. Ties go to the lower token.
    """
    num_rows, width = ids.shape
    # The rows run along the last axis, where comparing is quick: entry i of the one is entry j of the other in row r.
    same = np.ascontiguousarray(ids.T)[:, None] == np.ascontiguousarray(more_ids.T)[None]  # [K, K, m]
    places = np.flatnonzero(same)
    pairs, row = np.divmod(places, num_rows)
    i, j = np.divmod(pairs, width)
    all_ids = np.concatenate((ids, more_ids), axis=1)  # [m, 2K]
    all_probs = np.concatenate((probs, more_probs), axis=1)
    all_probs[row, i] += all_probs[row, j + width]
    all_probs[row, j + width] = 0.0
    # The bits of floats that are not negative are in the order of the floats: probability and token sort as one number.
    entries = all_probs.view(np.int32).astype(np.int64) << 32
    entries |= LAST_ID - all_ids
    entries.sort(axis=1)
    best = entries[:, : -width - 1 : -1]
    best_probs = (best >> 32).astype(np.int32).view(np.float32)
    return (LAST_ID - (best & 0xFFFFFFFF)).astype(np.int32), best_probs


def _first_times(keys: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The places where a key stands for the first time, and the others: they wait until the first ones are in."""
    first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))  # later entries overwrite
    if len(first) == len(keys):
        return range(len(keys)), ()
    return sorted(first.values()), sorted(set(range(len(keys))).difference(first.values()))
