"""N-gram tables: the target's average next-token distribution after each n-gram.

A row holds the top tokens of the running average over all occurrences of its n-gram. A lookup uses the longest known
n-gram. All sizes share one bounded table, so that a pass is added with a few array operations; the least recently
written n-grams are evicted.

A *context* packs the last tokens into one integer, the latest in the lowest bits. Tokens are stored plus 1, so the
lowest n fields of a context are an n-gram, and n-grams of different sizes are different integers.
"""

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from draftwood.sources.rowtable import NOTHING, Arrays, IdRows, RowTable, ScoreRows, check_vocabulary

MAX_PROMPTS = 4096  # prompt chunks remembered as already learned
MAX_KEY_BITS = 120  # limit of the file format of a table
LAST_ID = 2**31 - 2  # so that LAST_ID - NOTHING has 31 bits


class NgramTables:
    """Next-token distributions by n-gram."""

    def __init__(self, vocab_size: int, max_ngram: int = 4, width: int = 10, *, megabytes: int = 128) -> None:
        self.max_ngram = max_ngram
        self.width = width
        self._vocab_size = vocab_size
        self._bits = vocab_size.bit_length()  # tokens are stored as 1 to vocab_size
        self._masks = [
            (1 << self._bits * size) - 1 for size in range(max_ngram, -1, -1)
        ]  # longest n-gram first, then 0
        self._table = RowTable(width, RowTable.capacity_within(megabytes << 20, width))
        self._prompts: dict[int, None] = {}  # fingerprints, oldest first
        assert self._bits * max_ngram <= MAX_KEY_BITS

    # No __len__: an empty memory must not be falsy.
    @property
    def num_contexts(self) -> int:
        return len(self._table)

    @property
    def capacity(self) -> int:
        """Maximum number of n-grams."""
        return self._table.capacity

    @property
    def num_bytes(self) -> int:
        return self._table.num_bytes

    # -- contexts ----------------------------------------------------------------------------------------------------

    def context(self, tokens: Sequence[int]) -> int:
        """The context after these tokens; only the last ``max_ngram`` matter."""
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

    # -- lookup ------------------------------------------------------------------------------------------------------

    def lookup(self, tail: Sequence[int]) -> tuple[list[int], list[float]] | None:
        """Tokens that may follow a text, with probabilities, best first; None if unknown."""
        found, ids, probs = self.rows([self.context(tail)])
        if not found:
            return None
        known = int((probs[0] > 0.0).sum())
        return ids[0, :known].tolist(), probs[0, :known].tolist()

    def rows(self, contexts: Sequence[int]) -> tuple[list[int], IdRows, ScoreRows]:
        """Indices of the known contexts, and their rows [m, K], best first, padded with probability 0."""
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
        """Average rows [m, K], best first, of tokens that may follow each context into all of its n-grams."""
        keys: list[int] = []
        sources: list[int] = []
        # Longest first, so that short n-grams, which are the fallback, are evicted last.
        for mask, shorter in zip(self._masks, self._masks[1:], strict=False):
            # Texts shorter than the n-gram have none.
            keys += [context & mask for context in contexts if context > shorter]
            sources += [index for index, context in enumerate(contexts) if context > shorter]
        while keys:
            now, again = _split_repeats(keys)
            chosen = np.array([sources[place] for place in now])
            self._average([keys[place] for place in now], ids.take(chosen, axis=0), probs.take(chosen, axis=0))
            keys, sources = [keys[place] for place in again], [sources[place] for place in again]

    def _average(self, keys: Sequence[int], ids: IdRows, probs: ScoreRows) -> None:
        """stored <- top K of (count * stored + new) / (count + 1). Keys must be distinct; modifies the rows [m, K]."""
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
        """Whether this prompt chunk, from ``start`` to the end of ``tokens``, is new; it is marked as known.

        All samples of a prompt have the same logits along it, so they are learned only once.
        """
        read = np.array([start, *tokens], dtype=np.int64).tobytes()
        fingerprint = int.from_bytes(hashlib.blake2b(read, digest_size=8).digest(), "little", signed=True)
        if fingerprint in self._prompts:
            return False
        if len(self._prompts) >= MAX_PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        self._prompts[fingerprint] = None
        return True

    # -- saving and lo-------------------------------------------------------------------------------------------------

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
    """Add m pairs of distributions, given by their top entries [m, K]; return the top K sums, best first.

    Absent tokens count as 0; the token of a sum of 0 is meaningless. Ties go to the lower token.
    """
    num_rows, width = ids.shape
    # Rows are on the last axis, where comparing is fast: entry i of one equals entry j of the other in row r.
    same = np.ascontiguousarray(ids.T)[:, None] == np.ascontiguousarray(more_ids.T)[None]  # [K, K, m]
    places = np.flatnonzero(same)
    pairs, row = np.divmod(places, num_rows)
    i, j = np.divmod(pairs, width)
    all_ids = np.concatenate((ids, more_ids), axis=1)  # [m, 2K]
    all_probs = np.concatenate((probs, more_probs), axis=1)
    all_probs[row, i] += all_probs[row, j + width]
    all_probs[row, j + width] = 0.0
    # The bits of non-negative floats sort like the floats: probability and token are sorted as one integer.
    entries = all_probs.view(np.int32).astype(np.int64) << 32
    entries |= LAST_ID - all_ids
    entries.sort(axis=1)
    best = entries[:, : -width - 1 : -1]
    best_probs = (best >> 32).astype(np.int32).view(np.float32)
    return (LAST_ID - (best & 0xFFFFFFFF)).astype(np.int32), best_probs


def _split_repeats(keys: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Indices of the first occurrence of each key, and all other indices, which must be added later."""
    first = dict(zip(reversed(keys), range(len(keys) - 1, -1, -1), strict=True))  # later entries overwrite
    if len(first) == len(keys):
        return range(len(keys)), ()
    return sorted(first.values()), sorted(set(range(len(keys))).difference(first.values()))
