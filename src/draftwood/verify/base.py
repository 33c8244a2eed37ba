"""Walks down the tree along the tokens that the target selects: all of greedy verification, half of sampled."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from draftwood.tree import DraftTree


class AcceptedPath(NamedTuple):
    """The result of verifying one tree."""

    path: tuple[int, ...]  # accepted nodes, root first
    bonus: int  # the target's own token after the path

    def token_ids(self, tree: DraftTree) -> list[int]:
        """The tokens emitted by this cycle; the root was emitted before."""
        token_ids = [tree.tokens[node] for node in self.path[1:]]
        token_ids.append(self.bonus)
        return token_ids


def walk(tree: DraftTree, token_after: Callable[[int], int]) -> AcceptedPath:
    """Follow the child that carries the target's token until there is none; that last token is the bonus.

    ``token_after(node)`` is called once for each node of the path, starting at the root.
    """
    node, path = 0, [0]
    while True:
        token = token_after(node)
        child = tree.child_with(node, token)
        if child is None:
            return AcceptedPath(tuple(path), token)
        node = child
        path.append(node)


def accept_greedy(tree: DraftTree, choices: Sequence[int] | Callable[[int], int]) -> AcceptedPath:
    """``choices[i]`` (or ``choices(i)``, called for visited nodes only) is the target's greedy choice after node i."""
    return walk(tree, choices if callable(choices) else choices.__getitem__)
