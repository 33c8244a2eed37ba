"""Growing a tree with a source that has to be run: a small model or a draft head.

Such a source says what follows the nodes it was run over. Running it over a set of nodes, *expanding* them, is one
draft pass. A growth says which nodes are to be expanded next, takes what the source says, and in the end picks the
tree from all it knows. It never calls the source, so that one draft pass can serve the growths of many requests.

    while (frontier := growth.frontier()) is not None:
        growth.grow(*what_follows(frontier))
    tree = growth.tree()

Children are *chosen*, the best the source has, or *drawn* from what it says. Drawn ones fill a shape that was settled
before anything was drawn, in the order they were drawn in. So whether a node is in the tree, or in the part of it that
is verified, never depends on its own token, which is what exact verification needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from draftwood.growth.drawn import ALMOST_NOTHING, Draw, Ids, Probs, choose_best
from draftwood.tree import ROOT_SOURCE, DraftTree, Proposal, TreeShape


class Frontier(NamedTuple):
    """The nodes of the next draft pass."""

    tokens: Sequence[int]  # [F]
    parents: Sequence[int]  # [F] by number of expansion: the root is expansion 0, and its parent is -1


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthOptions:
    """What policies can be told; each looks at what concerns it."""

    depth: int | None = None  # levels below the root; None: 7 for `chain` and `beam`, no limit for the others
    top_k: int = 10  # children known of a node; and in `beam` the nodes of a level that are expanded
    batch: int = 10  # `optimal`, `salf`: nodes expanded at once
    threshold: float = 0.6  # `salf`: the sum of path probabilities below which a draft pass is not worth it
    shape: TreeShape | None = None  # `static`
    support: int = 64  # drawn: the best tokens of a distribution that children are drawn from
    hit: float = 0.7  # drawn: the chance of a child, once its parent was accepted and no sibling before it was


class GrowthSpec(NamedTuple):
    """What a growth is made from, besides its policy."""

    root: int
    budget: int  # nodes, the root included
    options: GrowthOptions
    draw: Draw = choose_best  # for one request; `choose_best`: children are chosen
    tag: str = "draft"  # the source of all nodes but the root


class Growth(ABC):
    """One tree while it grows.

    A subclass says how many children an expanded node gets, what becomes of them, and which nodes are next.
    """

    width: int  # how many successors are wanted of each expanded node, best first
    is_drawn: bool  # whether children are drawn from what the source says
    expansion_of: list[int]  # of every node of `tree()` its number in the order of expansion; -1: not expanded

    def __init__(self, spec: GrowthSpec, width: int) -> None:
        self._spec = spec
        self.is_drawn = spec.draw is not choose_best
        self.width = spec.options.support if self.is_drawn else max(width, 1)
        # All known nodes, parents and better or earlier siblings first.
        self._tokens = [spec.root]
        self._parents = [-1]
        self._depths = [0]
        self._probs = [1.0]
        self._expansions = [-1]
        self._num_expanded = 0
        self._proposals: dict[int, Proposal] = {}
        self._next = [0] if spec.budget > 1 else []

    def frontier(self) -> Frontier | None:
        """The nodes to be expanded now; None where the tree is done. The first are the root alone, if the budget has
        room for anything below it."""
        if not self._next:
            return None
        expansions, parents = self._expansions, self._parents
        above = [expansions[parents[node]] if node else -1 for node in self._next]
        return Frontier([self._tokens[node] for node in self._next], above)

    def grow(self, token_ids: Ids, probs: Probs) -> None:
        """What follows the nodes of the frontier: [F, k] each, best first. Entries of probability 0 or with a negative
        token say nothing. Children are drawn from the distribution that the others are in proportion to."""
        nodes = self._next
        probs = np.where((token_ids >= 0) & (probs > 0.0), np.minimum(probs, np.float32(1.0)), np.float32(0.0))
        counts = [self._num_children(node) for node in nodes]
        entries = self._spec.draw(probs, counts)
        if self.is_drawn:
            self._note_proposals(token_ids, probs)
        first = len(self._tokens)
        for node, count, row, chances, order in zip(
            nodes, counts, token_ids.tolist(), probs.tolist(), entries, strict=True
        ):
            self._expansions[node] = self._num_expanded
            self._num_expanded += 1
            kept = list(islice((entry for entry in order if chances[entry] > 0.0), count))
            self._add(node, [row[entry] for entry in kept], [chances[entry] for entry in kept])
        self._next = self._next_nodes(range(first, len(self._tokens)))

    def tree(self) -> DraftTree:
        """The tree of what is known by now, parents and better siblings first."""
        order = self._order()
        number = dict(zip(order, range(len(order)), strict=True))
        parents, depths, tokens, expansions = self._parents, self._depths, self._tokens, self._expansions
        self.expansion_of = [expansions[node] for node in order]
        return DraftTree.unchecked(
            tokens=tuple([tokens[node] for node in order]),
            parents=(-1, *[number[parents[node]] for node in order[1:]]),
            depths=tuple([depths[node] for node in order]),
            sources=(ROOT_SOURCE, *(self._spec.tag,) * (len(order) - 1)),
            probs=tuple([self._probs[node] for node in order]),
            proposals={number[node]: proposal for node, proposal in self._proposals.items()},
        )

    @abstractmethod
    def _num_children(self, node: int) -> int:
        """How many children a node gets at most. Nothing is drawn yet."""

    @abstractmethod
    def _add(self, node: int, tokens: Sequence[int], probs: Sequence[float]) -> None:
        """Takes note of a node's children, in their order."""

    @abstractmethod
    def _next_nodes(self, new: range) -> list[int]:
        """The nodes to be expanded next, after those in ``new`` were added."""

    @abstractmethod
    def _order(self) -> Sequence[int]:
        """The nodes of the tree, in its order."""

    def _note(self, parent: int, token: int, prob: float) -> None:
        self._tokens.append(token)
        self._parents.append(parent)
        self._depths.append(self._depths[parent] + 1)
        self._probs.append(prob)
        self._expansions.append(-1)

    def _note_proposals(self, token_ids: Ids, probs: Probs) -> None:
        """Every row as a distribution over its positive entries."""
        ids = token_ids.astype(np.int64)  # [F, S]
        q = probs.astype(np.float64)  # [F, S]
        q /= np.maximum(q.sum(axis=1, keepdims=True), ALMOST_NOTHING)
        sizes = np.count_nonzero(q, axis=1).tolist()  # [F]
        for node, size, row, chances in zip(self._next, sizes, ids, q, strict=True):
            if size == len(row):
                self._proposals[node] = Proposal(row, chances)
            elif size:
                support = np.flatnonzero(chances)
                self._proposals[node] = Proposal(row[support], chances[support])
