"""Sort all suffixes of a tokenised corpus, so that any token sequence can be found by binary search.

The corpus is one array of token ids in which ``SEPARATOR`` ends every document. A separator is smaller than any token
and ends the comparison, so the next document has no influence. Suffixes that are equal up to their separator are
ordered by position.
"""

import numpy as np
import numpy.typing as npt

from draftwood.progress import Progress, report

SEPARATOR = -1
MAX_TOKENS = 2**31 - 1  # positions are 32-bit integers
BYTES_PER_TOKEN = 90  # memory needed for sorting

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def suffix_array(tokens: Int32Array, progress: Progress | None = None) -> Int32Array:
    """Positions of all suffixes in ascending order. ``tokens`` must end with a separator.

    Prefix doubling: once suffixes are ranked by their first k tokens, two ranks k positions apart compare the first 2k
    tokens. Only suffixes that still share a rank take part in the next round.
    """
    label = f"sorting {len(tokens):,} tokens"
    rank = np.zeros(len(tokens), np.int64)
    unsorted = np.arange(len(tokens))  # positions that share a rank, grouped by rank
    second, width = _unique_separators(tokens), 0
    while len(unsorted):
        report(progress, label, len(tokens) - len(unsorted), len(tokens))
        # A shared rank means equal tokens and no separator so far, so ``width`` further on is still inside the corpus.
        keys = rank[unsorted] * (int(second.max()) + 1) + second[unsorted + width]
        unsorted = _refine(rank, unsorted, keys)
        second, width = rank, max(1, 2 * width)
    suffixes = np.empty(len(tokens), np.int32)
    suffixes[rank] = np.arange(len(tokens), dtype=np.int32)
    report(progress, label, len(tokens), len(tokens))
    return suffixes


def _unique_separators(tokens: Int32Array) -> Int64Array:
    """Replace each separator by a unique symbol below all tokens, so that no comparison goes beyond one."""
    separators = np.flatnonzero(tokens == SEPARATOR)
    symbols = tokens.astype(np.int64) + len(separators)
    symbols[separators] = np.arange(len(separators))
    return symbols


def _refine(rank: Int64Array, unsorted: Int64Array, keys: Int64Array) -> Int64Array:
    """Sort by the keys, update the ranks, and return the positions that still share a rank."""
    order = np.argsort(keys)
    places, keys = unsorted[order], keys[order]
    old = rank[places]
    is_new_group = _changes(keys)
    # A rank is the number of smaller suffixes: those before the old group, plus those in smaller new groups of it.
    rank[places] = old + _group_starts(is_new_group) - _group_starts(_changes(old))
    is_alone = is_new_group & np.append(is_new_group[1:], True)
    shared: Int64Array = places[~is_alone]
    return shared


def _changes(values: Int64Array) -> BoolArray:
    """Where a value differs from the one before; always True for the first."""
    changes = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes


def _group_starts(is_start: BoolArray) -> Int64Array:
    """For every index the start of its group."""
    starts: Int64Array = np.maximum.accumulate(np.where(is_start, np.arange(len(is_start)), 0))
    return starts
