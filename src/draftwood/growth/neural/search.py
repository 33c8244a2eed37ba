"""Growths that a draft model can run by itself, pass after pass, without asking which nodes come next.

What it runs and finds is numbered: node 0 is the root, ``pass * width + place`` are the other nodes that are run, and
candidate ``node * top_k + rank`` is the token of that rank after a node.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from draftwood.compiled import build_found, load_core
from draftwood.growth.drawn import Ids, Probs
from draftwood.growth.neural.spec import GrowthSpec
from draftwood.targets import Found
from draftwood.tree import ROOT_SOURCE, DraftTree, TreeShape


class NumberedShape(NamedTuple):
    width: int
    top_k: int
    depth: int
    picks: tuple[int, ...]  # by node, the candidate that is run; -1: none
    candidates: Ids  # of all nodes but the root, in order


class SearchKind(NamedTuple):
    """What trees have in common that a draft model can run together."""

    width: int
    top_k: int
    anywhere: bool
    threshold: float | None
    is_fixed: bool


class FoundTree(NamedTuple):
    tree: DraftTree
    order: Sequence[int] | Ids  # of its nodes below the root: the candidates


class Search(NamedTuple):
    """One tree. It is the same as if the growth had been asked for its nodes, but for rounding of equal values."""

    spec: GrowthSpec
    width: int  # nodes expanded per pass
    top_k: int  # candidate children per node
    depth: int  # levels below the root
    passes: int  # below the root, at most
    anywhere: bool = False  # expands the best nodes at any depth; False: of the last level
    threshold: float | None = None  # stops when the path probabilities of the next nodes sum to less; None: never
    shape: NumberedShape | None = None  # expands the inner nodes of a shape, not the best

    @property
    def kind(self) -> SearchKind:
        return SearchKind(self.width, self.top_k, self.anywhere, self.threshold, self.shape is not None)

    def build(self, found: Found) -> FoundTree:
        """The tree, and its candidates in order."""
        core = load_core()
        if core is None:
            order = self.order(found.values)
            return FoundTree(self.tree(order, found.tokens, found.probs, found.picks, found.depths), order)
        spec, wanted = self.spec, None if self.shape is None else self.shape.candidates
        size = max(spec.budget - 1, 0) if wanted is None else len(wanted)
        return FoundTree(*build_found(core, found, size, wanted, spec.root, spec.tag))

    def order(self, values: Probs) -> Ids:
        """The candidates [n] that the tree consists of, by their path probabilities: parents come first."""
        if self.shape is not None:
            wanted = self.shape.candidates
            wanted = wanted[wanted < len(values)]  # the others are below nodes for which there was no room
            return wanted[values[wanted] > 0.0]
        # Positive floats sort like their bits. Numbers break ties, so that parents come first among equals too.
        keys = values.view(np.int32).astype(np.int64) << 32 | np.arange(len(values), 0, -1)
        size = min(self.spec.budget - 1, int(np.count_nonzero(values > 0.0)))
        if size < len(keys):
            keys = np.partition(keys, len(keys) - size)[len(keys) - size :]
        return len(values) - (np.sort(keys)[::-1] & 0xFFFFFFFF)

    def tree(self, order: Ids, tokens: Ids, probs: Probs, picks: Ids, depths: Ids) -> DraftTree:
        """The tree of the candidates in ``order``. Picks and depths are by node, tokens and probs by candidate."""
        spec = self.spec
        nodes = order // self.top_k  # that the candidates follow
        number = np.zeros(len(tokens) + 1, np.int64)  # of the candidates in the tree; the last one stands for the root
        number[order] = np.arange(1, len(order) + 1)
        return DraftTree.unchecked(
            tokens=(spec.root, *tokens[order].tolist()),
            parents=(-1, *number[picks[nodes]].tolist()),
            depths=(0, *(depths[nodes] + 1).tolist()),
            sources=(ROOT_SOURCE, *(spec.tag,) * len(order)),
            probs=(1.0, *probs[order].tolist()),
            proposals={},
        )

    def expansions(self, order: Sequence[int] | Ids, picks: Ids) -> list[int]:
        """Expansion number of every node of the tree: the root is 0, then come the nodes that were run; -1: was not."""
        run = np.full(len(picks) * self.top_k, -1, np.int64)  # by candidate
        nodes = np.flatnonzero(picks >= 0)
        run[picks[nodes]] = nodes - self.width + 1
        return [0, *run[np.asarray(order, np.int64)].tolist()]


def search_shape(spec: GrowthSpec, shape: TreeShape) -> Search:
    """A static tree."""
    numbered = number_shape(shape, max(spec.budget, 1))
    return Search(spec, numbered.width, numbered.top_k, numbered.depth, numbered.depth - 1, shape=numbered)


@lru_cache(maxsize=64)
def number_shape(shape: TreeShape, size: int) -> NumberedShape:
    """Number the first ``size`` nodes, with the width of the whole shape: trees of all sizes then run together."""
    inner = [sum(shape.num_children[node] > 0 for node in level) for level in shape.levels()]
    width, top_k = max(*inner, 1), max(*shape.num_children, 1)
    part = shape.first(size)
    node_of, candidate_of = {0: 0}, {}
    picks = [-1] * width * max(max(part.depths), 1)
    for depth, level in enumerate(part.levels()[1:], start=1):
        num_inner = 0
        for place in level:
            candidate_of[place] = node_of[part.parents[place]] * top_k + part.ranks[place]
            if part.num_children[place]:
                node_of[place] = depth * width + num_inner
                picks[node_of[place]] = candidate_of[place]
                num_inner += 1
    candidates = np.array([candidate_of[place] for place in range(1, len(part))], np.int32)
    return NumberedShape(width, top_k, max(part.depths), tuple(picks), candidates)
