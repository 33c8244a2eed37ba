"""Greedy verification: accept the longest path that greedy decoding would have taken."""

from collections.abc import Callable, Sequence

from draftwood.tree import DraftTree
from draftwood.verify.base import AcceptedPath, walk


def accept_greedy(tree: DraftTree, choices: Sequence[int] | Callable[[int], int]) -> AcceptedPath:
    """``choices[i]`` (or ``choices(i)``, called for visited nodes only) is the target's greedy choice after node i."""
    return walk(tree, choices if callable(choices) else choices.__getitem__)
