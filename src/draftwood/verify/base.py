"""What greedy and sampled verification share: the walk down the tree along the tokens that the target settles on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from draftwood.tree.draft import DraftTree


class Accepted(NamedTuple):
    """The outcome of one cycle."""

    path: tuple[int, ...]  # accepted nodes, root first
    bonus: int  # the token the target adds after the path

    def token_ids(self, tree: DraftTree) -> list[int]:
        """The tokens this cycle emits: the root's is already there."""
        return [*(tree.tokens[node] for node in self.path[1:]), self.bonus]


def walk(tree: DraftTree, token_after: Callable[[int], int]) -> Accepted:
    """Follows the child that carries the target's token until there is none; that last token is the bonus.

    ``token_after(node)`` is asked for the nodes of the path alone, once each, from the root on.
    """
    path = [0]
    while True:
        token = token_after(path[-1])
        child = tree.child_with(path[-1], token)
        if child is None:
            return Accepted(tuple(path), token)
        path.append(child)
