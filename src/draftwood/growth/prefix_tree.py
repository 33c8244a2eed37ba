"""Merge many continuations into one prefix tree and keep the most frequent nodes."""

import numpy as np
import numpy.typing as npt

from draftwood.tree import ROOT_SOURCE, DraftTree

PADDING = -1  # follows the end of a short continuation


def grow_frequency_tree(
    root_token: int,
    continuations: npt.NDArray[np.integer],  # [m, d], padded at the end
    source: str,
    budget: int,
) -> DraftTree:
    """The ``budget - 1`` most frequent nodes of the prefix tree of the continuations, below the root.

    A node's count is the number of continuations through it; its probability is its count over its parent's count. Ties
    go to the node nearer the root, then to the lower token. Siblings are ordered by frequency.
    """
    num_rows, length = continuations.shape
    if budget < 2 or not continuations.size:
        return DraftTree.root_only(root_token)
    rows = _sort_rows(continuations)
    # In sorted rows, the continuations through a node are adjacent: a node begins where a prefix changes.
    is_new = np.ones((num_rows, length), np.bool_)
    np.logical_or.accumulate(rows[1:] != rows[:-1], axis=1, out=is_new[1:])
    by_level = is_new.T.ravel()  # [d * m], level by level; each level begins with a new node
    places = np.flatnonzero(by_level)  # [K], where the nodes begin
    counts = np.diff(places, append=by_level.size)
    tokens = rows.T.ravel()[places]
    levels = places // num_rows
    # The parent of a node is the node above that contains its first row; -1 is the root.
    node_of = np.cumsum(by_level) - 1  # [d * m]
    parents = np.where(levels > 0, node_of[places - num_rows], -1)

    kept = _most_frequent(tokens, levels, counts, budget - 1)
    number = np.zeros(len(places) + 1, np.int64)  # index in the new tree; the last entry is the root, 0
    number[kept] = np.arange(1, len(kept) + 1)
    totals = np.append(counts, num_rows)[parents[kept]]
    return DraftTree(
        tokens=(root_token, *tokens[kept].tolist()),
        parents=(-1, *number[parents[kept]].tolist()),
        depths=(0, *(levels[kept] + 1).tolist()),
        sources=(ROOT_SOURCE, *(source,) * len(kept)),
        probs=(1.0, *(counts[kept] / totals).tolist()),
    )


def _sort_rows(rows: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
    """Sort rows lexicographically, padding first; cheap if they are already sorted."""
    num_rows, length = rows.shape
    # Big-endian bytes compare like the numbers; trailing zero bytes (padding) count as absent.
    words = np.ascontiguousarray((rows + 1).astype(">u4")).view(f"S{4 * length}").reshape(num_rows)
    return rows[np.argsort(words, kind="stable")]


def _most_frequent(
    tokens: npt.NDArray[np.integer], levels: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], size: int
) -> npt.NDArray[np.int64]:
    """Select nodes, best first. A parent has at least its child's count and a lower level, so it comes first."""
    nodes = np.flatnonzero(tokens != PADDING)
    merit = levels[nodes] - counts[nodes] * (int(levels[-1]) + 1)  # lower is better
    if len(nodes) > size:  # avoid sorting nodes that are dropped anyway
        is_candidate = merit <= np.partition(merit, size - 1)[size - 1]
        nodes, merit = nodes[is_candidate], merit[is_candidate]
    return nodes[np.lexsort((tokens[nodes], merit))[:size]]
