"""Sorts all suffixes of a tokenised corpus, so that every run of tokens can be looked up by bisection.

The corpus is one array of token ids in which ``SEPARATOR`` closes every document. A separator is smaller than any token
and ends the comparison: what stands in the next document plays no part. Suffixes that are equal up to their separator
come in the order of their places.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from draftwood.progress import Progress, report

SEPARATOR = -1
MAX_TOKENS = 2**31 - 1  # places are 32-bit numbers
BYTES_PER_TOKEN = 90  # of memory, while suffixes are sorted

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def suffix_array(tokens: Int32Array, progress: Progress | None = None) -> Int32Array:
    """The places of all suffixes in ascending order. ``tokens`` ends with a separator.

    Prefix doubling: suffixes that are sorted by their first k tokens have ranks, and two ranks k places apart say how
    the first 2k tokens compare. Only suffixes that still share their rank take part in the next round.
    """
    label = f"sorting {len(tokens):,} tokens"
    rank = np.zeros(len(tokens), np.int64)
    unsorted = np.arange(len(tokens))  # places whose rank is shared, those of one rank side by side
    second, width = _letters(tokens), 0
    while len(unsorted):
        report(progress, label, len(tokens) - len(unsorted), len(tokens))
        # A shared rank means equal tokens so far and no separator, so a place ``width`` further on is still inside.
        keys = rank[unsorted] * (int(second.max()) + 1) + second[unsorted + width]
        unsorted = _refine(rank, unsorted, keys)
        second, width = rank, max(1, 2 * width)
    suffixes = np.empty(len(tokens), np.int32)
    suffixes[rank] = np.arange(len(tokens), dtype=np.int32)
    report(progress, label, len(tokens), len(tokens))
    return suffixes


def _letters(tokens: Int32Array) -> Int64Array:
    """The tokens with every separator a letter of its own, below all tokens: no comparison ever goes beyond one."""
    separators = np.flatnonzero(tokens == SEPARATOR)
    letters = tokens.astype(np.int64) + len(separators)
    letters[separators] = np.arange(len(separators))
    return letters


def _refine(rank: Int64Array, unsorted: Int64Array, keys: Int64Array) -> Int64Array:
    """Sorts by the keys, gives the new ranks, and returns the places that still share theirs."""
    order = np.argsort(keys)
    places, keys = unsorted[order], keys[order]
    old = rank[places]
    is_new_group = _changes(keys)
    # A rank is the number of smaller suffixes: that of the old group, and those of it in smaller new groups.
    rank[places] = old + _group_starts(is_new_group) - _group_starts(_changes(old))
    is_alone = is_new_group & np.append(is_new_group[1:], True)
    shared: Int64Array = places[~is_alone]
    return shared


def _changes(values: Int64Array) -> BoolArray:
    """Where a value differs from the one before it; the first does."""
    changes = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=changes[1:])
    return changes


def _group_starts(is_start: BoolArray) -> Int64Array:
    """For every index the start of its group."""
    starts: Int64Array = np.maximum.accumulate(np.where(is_start, np.arange(len(is_start)), 0))
    return starts
