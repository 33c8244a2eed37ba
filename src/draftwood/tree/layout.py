"""Layout of a tree in the sequence: positions and attention mask."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from draftwood.tree.draft import DraftTree


def ancestor_mask(parents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """``mask[i, j]``: whether node i attends to node j, that is to its ancestors and itself.

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
    """Whether every node is the child of the one before it, so that a causal mask suffices."""
    return all(parent == node - 1 for node, parent in enumerate(parents))


def positions(tree: DraftTree, prefix_len: int) -> list[int]:
    """The position of a node at depth d is ``prefix_len + d``, that of its token if accepted."""
    return [prefix_len + depth for depth in tree.depths]


def pack_places(trees: Iterable[DraftTree]) -> bytes:
    """Where the packed trees are, as C reads it."""
    return b"".join([tree.pack().place_of(tree.number) for tree in trees])
