"""Growing a tree with a draft model: a small model or a draft head.

A draft model predicts what follows the nodes that it runs over. Running it over a set of nodes, *expanding* them, is
one draft pass. A growth selects the nodes to expand next, receives the predictions, and finally picks the tree from all
known nodes. It never calls the draft model itself, so that one draft pass can serve many requests.

    while (frontier := growth.frontier()) is not None:
        growth.grow(*predict(frontier))
    tree = growth.tree()

Children are either *chosen* (the most likely ones) or *drawn* from the predicted distribution. Drawn children fill a
shape that is fixed before anything is drawn, in the order of the draw. Whether a node is in the tree, or in its
verified part, therefore never depends on its own token, as exact verification requires.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from draftwood.growth.drawn import MIN_PROB, Ids, Probs, choose_best
from draftwood.growth.neural.search import Search
from draftwood.growth.neural.spec import GrowthSpec
from draftwood.targets import Found
from draftwood.tree import ROOT_SOURCE, DraftTree, Proposal


class Frontier(NamedTuple):
    """The nodes of the next draft pass."""

    tokens: Sequence[int]  # [F]
    parents: Sequence[int]  # [F] by expansion number: the root is expansion 0 and its parent is -1


class GrowingTree(Protocol):
    """What a drafter with a draft model needs of a growth."""

    width: int  # number of top successors needed per expanded node

    @property
    def search(self) -> Search | None:
        """The growth as one that a draft model can run by itself, if it is."""

    @property
    def expansion_of(self) -> Sequence[int]:
        """Expansion number of every node of `tree()`; -1: not expanded."""

    def frontier(self) -> Frontier | None: ...

    def grow(self, token_ids: Ids, probs: Probs) -> None: ...

    def take(self, found: Found) -> None:
        """What a draft model found that ran ``search`` by itself; in place of ``frontier`` and ``grow``."""

    def tree(self) -> DraftTree: ...


class Growth(ABC):
    """One growing tree. Subclasses set the number of children, record them, and select the next nodes to expand."""

    width: int  # number of top successors needed per expanded node
    search: Search | None = None  # if a draft model can run it by itself
    is_drawn: bool  # whether children are drawn

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
        self._found: Found | None = None
        self._in_tree: Sequence[int] | Ids = ()  # nodes, or candidates of what was found
        self._next = [0] if spec.budget > 1 else []

    def frontier(self) -> Frontier | None:
        """The nodes to expand next, at first the root; None if the tree is complete."""
        if not self._next:
            return None
        expansions, parents = self._expansions, self._parents
        above = [expansions[parents[node]] if node else -1 for node in self._next]
        return Frontier([self._tokens[node] for node in self._next], above)

    def grow(self, token_ids: Ids, probs: Probs) -> None:
        """Add the predictions after the nodes of the frontier: [F, k] each, best first. Entries of probability 0 or
        with a negative token are ignored; the others are normalised before children are drawn."""
        nodes = self._next
        probs = np.where((token_ids >= 0) & (probs > 0.0), np.minimum(probs, np.float32(1.0)), np.float32(0.0))
        counts = [self._num_children(node) for node in nodes]
        entries = self._spec.draw(probs, counts)
        if self.is_drawn:
            self._record_proposals(token_ids, probs)
        first = len(self._tokens)
        for node, count, row, chances, order in zip(
            nodes, counts, token_ids.tolist(), probs.tolist(), entries, strict=True
        ):
            self._expansions[node] = self._num_expanded
            self._num_expanded += 1
            kept = list(islice((entry for entry in order if chances[entry] > 0.0), count))
            self._add(node, [row[entry] for entry in kept], [chances[entry] for entry in kept])
        self._next = self._next_nodes(range(first, len(self._tokens)))

    def take(self, found: Found) -> None:
        self._found = found

    @property
    def expansion_of(self) -> list[int]:
        """Expansion number of every node of `tree()`; -1: not expanded."""
        if self._found is not None and self.search is not None:
            return self.search.expansions(self._in_tree, self._found.picks)
        return [self._expansions[node] for node in self._in_tree]

    def tree(self) -> DraftTree:
        """Build the tree from all known nodes, parents and better siblings first."""
        if self._found is not None and self.search is not None:
            tree, self._in_tree = self.search.build(self._found)
            return tree
        order = self._in_tree = self._order()
        number = dict(zip(order, range(len(order)), strict=True))
        parents, depths, tokens = self._parents, self._depths, self._tokens
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
        """Maximum number of children of a node, before anything is drawn."""

    @abstractmethod
    def _add(self, node: int, tokens: Sequence[int], probs: Sequence[float]) -> None:
        """Record the children of a node in order."""

    @abstractmethod
    def _next_nodes(self, new: range) -> list[int]:
        """Select the nodes to expand next, after those in ``new`` were added."""

    @abstractmethod
    def _order(self) -> Sequence[int]:
        """The nodes of the tree, in order."""

    def _record_node(self, parent: int, token: int, prob: float) -> None:
        self._tokens.append(token)
        self._parents.append(parent)
        self._depths.append(self._depths[parent] + 1)
        self._probs.append(prob)
        self._expansions.append(-1)

    def _record_proposals(self, token_ids: Ids, probs: Probs) -> None:
        """Store each row as a distribution over its positive entries."""
        ids = token_ids.astype(np.int64)  # [F, S]
        q = probs.astype(np.float64)  # [F, S]
        q /= np.maximum(q.sum(axis=1, keepdims=True), MIN_PROB)
        sizes = np.count_nonzero(q, axis=1).tolist()  # [F]
        for node, size, row, chances in zip(self._next, sizes, ids, q, strict=True):
            if size == len(row):
                self._proposals[node] = Proposal(row, chances)
            elif size:
                support = np.flatnonzero(chances)
                self._proposals[node] = Proposal(row[support], chances[support])
