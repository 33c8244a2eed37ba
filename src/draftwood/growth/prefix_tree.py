"""Merges many continuations into one tree and keeps what most of them agree on."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from draftwood.tree import ROOT_SOURCE, DraftTree

PADDING = -1  # behind the end of a continuation that is shorter than the others


def grow_frequency_tree(
    root_token: int,
    continuations: npt.NDArray[np.integer],  # [m, d], padded behind the end
    source: str,
    budget: int,
) -> DraftTree:
    """The ``budget - 1`` most frequent nodes of the prefix tree of the continuations, below the root.

    A node's count is the number of continuations that pass through it, its probability that count over its parent's.
    Equal counts go to the node nearer the root, then to the lower token. Siblings come most frequent first.
    """
    num_rows, length = continuations.shape
    if budget < 2 or not continuations.size:
        return DraftTree.root_only(root_token)
    rows = _sorted_rows(continuations)
    # In sorted rows the continuations through a node are neighbours: a node begins where a prefix of a row is new.
    is_new = np.ones((num_rows, length), np.bool_)
    np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1, out=is_new[1:])
    by_level = is_new.T.ravel()  # [d * m], level after level; each level begins with a new node
    places = np.flatnonzero(by_level)  # [K], where the nodes begin
    counts = np.diff(places, append=by_level.size)
    tokens = rows.T.ravel()[places]
    levels = places // num_rows
    # The parent of a node is the node of the level above that its first row belongs to; -1 is the root.
    node_of = np.cumsum(by_level) - 1  # [d * m]
    parents = np.where(levels > 0, node_of[places - num_rows], -1)

    kept = _most_frequent(tokens, levels, counts, budget - 1)
    number = np.zeros(len(places) + 1, np.int64)  # in the new tree; the last entry is the root's, which is 0
    number[kept] = np.arange(1, len(kept) + 1)
    totals = np.append(counts, num_rows)[parents[kept]]
    return DraftTree(
        tokens=(root_token, *tokens[kept].tolist()),
        parents=(-1, *number[parents[kept]].tolist()),
        depths=(0, *(levels[kept] + 1).tolist()),
        sources=(ROOT_SOURCE, *(source,) * len(kept)),
        probs=(1.0, *(counts[kept] / totals).tolist()),
    )


def _sorted_rows(rows: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """The rows in lexicographic order, padding first; rows that are in order already cost next to nothing."""
    num_rows, length = rows.shape
    # Big-endian bytes compare like the numbers; zero bytes at the end, the padding, count as absent.
    words = np.ascontiguousarray((rows + 1).astype(">u4")).view(f"S{4 * length}").reshape(num_rows)
    return rows[np.argsort(words, kind="stable")]


def _most_frequent(
    tokens: npt.NDArray[np.integer], levels: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], size: int
) -> npt.NDArray[np.int64]:
    """The nodes to keep, best first. A parent's count is no lower and its level is, so it comes before its children."""
    nodes = np.flatnonzero(tokens != PADDING)
    merit = levels[nodes] - counts[nodes] * (int(levels[-1]) + 1)  # the lower the better
    if len(nodes) > size:  # most nodes of a large tree need not be sorted
        hopeful = merit <= np.partition(merit, size - 1)[size - 1]
        nodes, merit = nodes[hopeful], merit[hopeful]
    return nodes[np.lexsort((tokens[nodes], merit))[:size]]
