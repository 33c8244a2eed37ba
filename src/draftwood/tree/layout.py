"""Where the nodes of a tree stand: positions in the text, and who may see whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from draftwood.tree.draft import DraftTree


def ancestor_mask(parents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """``mask[i, j]`` says whether node i attends to node j: its ancestors and itself.

    For a root with children 1 and 2, and 3 below 1::

        1 . . .
        1 1 . .
        1 . 1 .
        1 1 . 1
    """
    size = len(parents)
    mask = np.zeros((size, size), dtype=np.bool_)  # [N, N]
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] = mask[parent]
        mask[node, node] = True
    return mask


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every node is the child of the one before it, so that plain causal order applies."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


def positions(tree: DraftTree, prefix_len: int) -> list[int]:
    """Node i of depth d sits where its token stands if it is accepted: ``prefix_len + d``."""
    return [prefix_len + depth for depth in tree.depths]
