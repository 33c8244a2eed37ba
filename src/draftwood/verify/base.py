"""What greedy and sampled verification share: the walk down the tree along the tokens that the target settles on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from draftwood.tree import DraftTree


class AcceptedPath(NamedTuple):
    """The outcome of one cycle."""

    path: tuple[int, ...]  # accepted nodes, root first
    bonus: int  # the token the target adds after the path

    def token_ids(self, tree: DraftTree) -> list[int]:
        """The tokens this cycle emits: the root's is already there."""
        token_ids = [tree.tokens[node] for node in self.path[1:]]
        token_ids.append(self.bonus)
        return token_ids


def walk(tree: DraftTree, token_after: Callable[[int], int]) -> AcceptedPath:
    """Follows the child that carries the target's token until there is none; that last token is the bonus.

    ``token_after(node)`` is asked for the nodes of the path alone, once each, from the root on.
    """
    node, path = 0, [0]
    while True:
        token = token_after(node)
        child = tree.child_with(node, token)
        if child is None:
            return AcceptedPath(tuple(path), token)
        node = child
        path.append(node)
