"""The simplest tree: one guess after another."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.tree import DraftTree


def chain(root: int, guesses: Sequence[int], source: str, budget: int) -> DraftTree:
    """The root and as many of the guesses as the budget leaves room for."""
    return DraftTree.chain([root, *guesses[: budget - 1]], source)
