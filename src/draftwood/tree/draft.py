"""The draft tree as data: arrays in topological order, and their invariants.

A tree holds tokens, parents, depths, sources and probabilities. It is independent of models, caches and drafters. Node
0 is the root: the last committed token, which the target has not processed yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import repeat
from operator import itemgetter, lt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood.errors import TreeError
from draftwood.tree.packed import COLUMNS, ROOT_SOURCE, Forest

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
_Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]

BYPASS = "bypass"  # route: a drafter that usually builds trees proposes a bare chain


class Proposal(NamedTuple):
    """The distribution q that a node's children were drawn from, over its support."""

    token_ids: IntArray  # [S], distinct
    probs: FloatArray  # [S], positive, sums to 1


NO_PROPOSALS: Mapping[int, Proposal] = {}
NONE_CHOSEN: Mapping[int, int] = {}
CACHED_ROOTS = 1 << 13  # cached trees of one node: plain decoding creates one per token


class DraftTree:
    """Guesses for the tokens after the root. Do not modify it: trees are shared.

    Children are tried in the order in which they were added. A node in ``proposals`` has *drawn* children: they were
    drawn without replacement, in that order, from its proposal. *Chosen* children of such a node come before the drawn
    ones and are counted in ``num_chosen``; the proposal then covers only the other tokens.

    A tree that C has grown or cut stays packed in its forest; a column becomes a tuple when it is first read.
    """

    __slots__ = (*COLUMNS, "_forest", "is_native", "num_chosen", "number", "proposals", "route", "size")

    tokens: tuple[int, ...]  # [N]
    parents: tuple[int, ...]  # [N], parents[0] == -1, parents[i] < i
    depths: tuple[int, ...]  # [N], depths[0] == 0
    sources: tuple[str, ...]  # [N], which source suggested the node
    probs: tuple[float, ...]  # [N], the drafter's estimate of the node given its parent
    proposals: Mapping[int, Proposal]
    num_chosen: Mapping[int, int]
    route: str  # how the drafter built this tree, if it has several ways
    is_native: bool  # whether C has made it, from tokens that the text or the target contain
    size: int  # N

    def __init__(
        self,
        tokens: tuple[int, ...],
        parents: tuple[int, ...],
        depths: tuple[int, ...],
        sources: tuple[str, ...],
        probs: tuple[float, ...],
        proposals: Mapping[int, Proposal] = NO_PROPOSALS,
        num_chosen: Mapping[int, int] = NONE_CHOSEN,
        route: str = "",
    ) -> None:
        self._set(tokens, parents, depths, sources, probs, proposals, num_chosen, route)
        _check(self)

    @classmethod
    def unchecked(
        cls,
        tokens: tuple[int, ...],
        parents: tuple[int, ...],
        depths: tuple[int, ...],
        sources: tuple[str, ...],
        probs: tuple[float, ...],
        proposals: Mapping[int, Proposal] = NO_PROPOSALS,
        num_chosen: Mapping[int, int] = NONE_CHOSEN,
        route: str = "",
    ) -> DraftTree:
        """Create a tree without checks; for callers that guarantee the invariants."""
        tree = object.__new__(cls)
        tree._set(tokens, parents, depths, sources, probs, proposals, num_chosen, route)
        return tree

    @classmethod
    def all_in(cls, forest: Forest, routes: Iterable[str]) -> list[DraftTree]:
        """The trees that C has written into a forest, of chosen children and without checks."""
        trees, new = list[DraftTree](), object.__new__
        for number, (size, route) in enumerate(zip(forest.list_sizes(), routes, strict=False)):
            trees.append(tree := new(cls))  # a cycle makes two trees for each request
            tree._forest, tree.number, tree.size, tree.route, tree.is_native = forest, number, size, route, True
            tree.proposals, tree.num_chosen = NO_PROPOSALS, NONE_CHOSEN
        return trees

    def _set(
        self,
        tokens: tuple[int, ...],
        parents: tuple[int, ...],
        depths: tuple[int, ...],
        sources: tuple[str, ...],
        probs: tuple[float, ...],
        proposals: Mapping[int, Proposal],
        num_chosen: Mapping[int, int],
        route: str,
    ) -> None:
        self.tokens, self.parents, self.depths, self.sources, self.probs = tokens, parents, depths, sources, probs
        self.proposals, self.num_chosen, self.route = proposals, num_chosen, route
        self._forest: Forest | None = None
        self.size, self.is_native, self.number = len(tokens), False, 0  # number: in its forest

    def __getattr__(self, name: str) -> Any:
        """Unpacks a column that is read for the first time."""
        if name not in COLUMNS or self._forest is None:
            raise AttributeError(name)
        column = self._forest.column(name, self.number, self.size)
        setattr(self, name, column)
        return column

    def __len__(self) -> int:
        return self.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DraftTree) and self._fields() == other._fields()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"DraftTree{self._fields()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return DraftTree.unchecked, self._fields()  # memory has another address in a copy

    def _fields(self) -> tuple[Any, ...]:
        columns = self.tokens, self.parents, self.depths, self.sources, self.probs
        return *columns, self.proposals, self.num_chosen, self.route

    def replace(self, *, proposals: Mapping[int, Proposal], num_chosen: Mapping[int, int] | None = None) -> DraftTree:
        """The tree with other proposals."""
        chosen = self.num_chosen if num_chosen is None else num_chosen
        columns = self.tokens, self.parents, self.depths, self.sources, self.probs
        return DraftTree(*columns, proposals, chosen, self.route)

    @property
    def root(self) -> int:
        """The token of the root."""
        forest = self._forest
        return self.tokens[0] if forest is None else forest.ints[forest.starts[self.number]]

    def links(self) -> tuple[Sequence[int], Sequence[int]]:
        """Tokens and parents, without a conversion."""
        forest = self._forest
        return (self.tokens, self.parents) if forest is None else forest.links(self.number, self.size)

    def pack(self) -> Forest:
        """The tree as columns of numbers, which are kept."""
        if self._forest is None:
            self._forest = Forest.of((self.tokens, self.parents, self.depths), self.sources, self.probs)
        return self._forest

    @staticmethod
    def root_only(token: int) -> DraftTree:
        return _root_only(token)

    @classmethod
    def chain(
        cls, tokens: Sequence[int], source: str = ROOT_SOURCE, probs: Sequence[float] | None = None, route: str = ""
    ) -> DraftTree:
        """``tokens[0]`` is the root; each further token is the only child of the one before."""
        size = len(tokens)
        return cls(
            tokens=tuple(tokens),
            parents=tuple(range(-1, size - 1)),
            depths=tuple(range(size)),
            sources=(ROOT_SOURCE, *(source,) * (size - 1)),
            probs=(1.0,) * size if probs is None else tuple(probs),
            route=route,
        )

    def children(self) -> list[list[int]]:
        """For every node its children, in the order in which they are tried."""
        lists: list[list[int]] = [[] for _ in self.tokens]
        for node in range(1, len(self.tokens)):
            lists[self.parents[node]].append(node)
        return lists

    def children_of(self, node: int) -> list[int]:
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def source_of(self, node: int) -> str:
        return self.sources[node] if self._forest is None else self._forest.source_of(self.number, node)

    def path(self, node: int) -> list[int]:
        """The nodes from the root to ``node``, inclusive."""
        path = [node]
        while path[-1] != 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """The tokens that a path adds to the output, without the root."""
        return [self.tokens[i] for i in self.path(node)[1:]]

    def paths(self) -> list[tuple[int, ...]]:
        """``path_tokens`` of every node."""
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(self.tokens[1:], self.parents[1:], strict=True):
            paths.append((*paths[parent], token))
        return paths

    def values(self) -> list[float]:
        """For every node the product of the estimates on its path."""
        values = [1.0]
        for parent, prob in zip(self.parents[1:], self.probs[1:], strict=True):
            values.append(values[parent] * prob)
        return values

    def child_with(self, node: int, token: int) -> int | None:
        """The child of a node that carries the token."""
        tokens, parents, child = self.tokens, self.parents, node
        with suppress(ValueError):
            while True:
                child = tokens.index(token, child + 1)
                if parents[child] == node:
                    return child
        return None

    def follow(self, tokens: Iterable[int]) -> list[int]:
        """The nodes below the root that carry the first of these tokens, one below the other."""
        path = [0]
        for token in tokens:
            if (child := self.child_with(path[-1], token)) is None:
                break
            path.append(child)
        return path[1:]

    def limit_depth(self, max_depth: int) -> DraftTree:
        """The tree without the nodes below ``max_depth``."""
        if self.size <= max_depth + 1 or max(self.depths) <= max_depth:
            return self
        return self.select([node for node, depth in enumerate(self.depths) if depth <= max_depth])

    def first(self, size: int) -> DraftTree:
        """The tree of the first ``size`` nodes."""
        return self if size >= self.size else self.select(range(size))

    def select(self, kept: Sequence[int]) -> DraftTree:
        """The tree of these nodes, which must be ascending and include all parents. For exact verification, drawn
        siblings may only be dropped from the end and independently of their tokens."""
        if len(kept) == len(self.tokens):
            return self
        size = len(kept)
        number = dict(zip(kept, range(size), strict=True))
        pick: _Pick = itemgetter(*kept) if size > 1 else lambda column: column[:size]
        parents = (-1, *map(number.get, pick(self.parents)[1:], repeat(size)))
        # A part of a valid tree is valid if its nodes are in order and no parent is missing.
        if not kept or kept[0] != 0 or size in parents or not all(map(lt, kept, kept[1:])):
            raise TreeError("The selected nodes must be ascending and include their parents", got=list(kept))
        inner = set(parents)
        return DraftTree.unchecked(
            tokens=pick(self.tokens),
            parents=parents,
            depths=pick(self.depths),
            sources=pick(self.sources),
            probs=pick(self.probs),
            proposals={number[n]: q for n, q in self.proposals.items() if number.get(n) in inner},
            num_chosen={
                number[n]: min(count, parents.count(number[n]))
                for n, count in self.num_chosen.items()
                if number.get(n) in inner
            },
            route=self.route,
        )

    def leaves(self) -> list[int]:
        inner = set(self.parents)
        return [node for node in range(len(self.tokens)) if node not in inner]


class TreeBuilder:
    """Builds a tree node by node. Equal children of a node are merged; the higher probability sets the source."""

    def __init__(self, root_token: int) -> None:
        # token, parent, depth, source, probability
        self._nodes: list[tuple[int, int, int, str, float]] = [(root_token, -1, 0, ROOT_SOURCE, 1.0)]
        self._index: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, parent: int, token: int, source: str, prob: float = 1.0) -> int:
        """Return the node with ``token`` under ``parent``, new or existing."""
        new = self.add_new(parent, token, source, prob)
        if new is not None:
            return new
        known = self._index[(parent, token)]
        depth, known_prob = self._nodes[known][2], self._nodes[known][4]
        if prob > known_prob:
            self._nodes[known] = (token, parent, depth, source, prob)
        return known

    def add_new(self, parent: int, token: int, source: str, prob: float = 1.0) -> int | None:
        """Return the new node; None, without a change, if ``parent`` already has the token."""
        edge = (parent, token)
        if edge in self._index:
            return None
        nodes = self._nodes
        node = self._index[edge] = len(nodes)
        nodes.append((token, parent, nodes[parent][2] + 1, source, prob))
        return node

    def find(self, parent: int, token: int) -> int | None:
        return self._index.get((parent, token))

    def depth(self, node: int) -> int:
        return self._nodes[node][2]

    def build(
        self,
        proposals: Mapping[int, Proposal] | None = None,
        num_chosen: Mapping[int, int] | None = None,
        route: str = "",
    ) -> DraftTree:
        tokens, parents, depths, sources, probs = zip(*self._nodes, strict=True)
        return DraftTree(tokens, parents, depths, sources, probs, proposals or {}, num_chosen or {}, route)


@lru_cache(maxsize=CACHED_ROOTS, typed=True)
def _root_only(token: int) -> DraftTree:
    return DraftTree.unchecked((token,), (-1,), (0,), (ROOT_SOURCE,), (1.0,))


def _check(tree: DraftTree) -> None:
    if not _is_valid(tree):
        _raise_broken_invariant(tree)
    if tree.proposals:
        _check_proposals(tree)


def _is_valid(tree: DraftTree) -> bool:
    """Whether all invariants hold. Optimised, since it runs for every tree of every cycle."""
    size, parents, depths = len(tree.tokens), tree.parents, tree.depths
    return (
        size > 0
        and size == len(parents) == len(depths) == len(tree.sources) == len(tree.probs)
        and parents[0] == -1
        and depths[0] == 0
        and min(parents[1:], default=0) >= 0
        and all(map(lt, parents, range(size)))
        and depths[1:] == tuple([depths[parent] + 1 for parent in parents[1:]])
        and len(set(zip(parents, tree.tokens, strict=True))) == size
    )


def _raise_broken_invariant(tree: DraftTree) -> None:
    """Raise for the first invariant that the tree breaks."""
    size = len(tree.tokens)
    if size == 0:
        raise TreeError("A draft tree needs at least its root", got="no nodes")
    lengths = {len(tree.parents), len(tree.depths), len(tree.sources), len(tree.probs)}
    if lengths != {size}:
        raise TreeError("The arrays of a draft tree differ in length", got=sorted({size, *lengths}))
    if tree.parents[0] != -1 or tree.depths[0] != 0:
        raise TreeError("Node 0 must be the root", got=f"parent {tree.parents[0]}, depth {tree.depths[0]}")
    seen: set[tuple[int, int]] = set()
    for node in range(1, size):
        parent = tree.parents[node]
        if not 0 <= parent < node:
            raise TreeError(f"Node {node} must come after its parent", got=parent, allowed=f"0 to {node - 1}")
        if tree.depths[node] != tree.depths[parent] + 1:
            raise TreeError(f"Node {node} has the wrong depth", got=tree.depths[node], allowed=tree.depths[parent] + 1)
        edge = (parent, tree.tokens[node])
        if edge in seen:
            raise TreeError(f"Node {parent} has two children with the token {edge[1]}", got=f"node {node}")
        seen.add(edge)


def _check_proposals(tree: DraftTree) -> None:
    below = tree.children()
    for node, proposal in tree.proposals.items():
        if not 0 <= node < len(tree):
            raise TreeError("A proposal belongs to no node", got=node, allowed=f"0 to {len(tree) - 1}")
        children = [tree.tokens[child] for child in below[node]]
        chosen = tree.num_chosen.get(node, 0)
        if not 0 <= chosen <= len(children):
            raise TreeError(f"Node {node} counts more chosen children than it has", got=chosen, allowed=len(children))
        support = set(proposal.token_ids.tolist())
        if not set(children[chosen:]) <= support:
            raise TreeError(f"Node {node} has a drawn child outside its proposal", got=children[chosen:])
        if support & set(children[:chosen]):
            raise TreeError(f"The proposal of node {node} covers a chosen child", got=children[:chosen])
