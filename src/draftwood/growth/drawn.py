"""Static trees filled by drawing: a source gives every node a distribution, its children are drawn from it.

Children are drawn without replacement, one after another, and stand in the tree in the order they were drawn in:
that is what exact verification needs. Log-probabilities plus Gumbel noise, sorted, are such a draw of a whole row at
once, and of all rows of a level at once. How many children a node gets was settled before anything was drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from draftwood.tree import ROOT_SOURCE, DraftTree, FloatArray, Proposal, TreeShape

DRAWS = ("gumbel", "multinomial", "chosen")
NOISE_BLOCK = 8192
ALMOST_NOTHING = np.float64(1e-300)  # in place of 0: far less than the smallest float32, whatever the noise

Context = TypeVar("Context")
Ids = npt.NDArray[np.int32]
Probs = npt.NDArray[np.float32]
# From distributions [m, K] and the numbers of children wanted [m] to entries of each row, in the order they are drawn
# in: as many as wanted or more, those of probability 0 last.
Draw = Callable[[Probs, Sequence[int]], Sequence[Sequence[int]]]


class RowSource(Protocol[Context]):
    """Distributions by context; what a context is, is its own business."""

    def rows(self, contexts: Sequence[Context]) -> tuple[list[int], Ids, Probs]:
        """Which contexts are known, and their tokens [m, K] and probabilities [m, K], best first. Rows may be short:
        then they end with entries of probability 0 and a negative token."""

    def extend_context(self, context: Context, token: int) -> Context: ...


class GumbelNoise:
    """Independent numbers exp(-G), G with Gumbel's distribution, which makes them exponential ones; made in bulk.

    Each is given out once: noise that is used twice ties draws together, and output would no longer be exact.
    """

    def __init__(self, rng: np.random.Generator, at_once: int = NOISE_BLOCK) -> None:
        self._rng = rng
        self._at_once = at_once
        self._noise: FloatArray = np.empty(0)
        self._used = 0

    def take(self, num_rows: int, width: int) -> FloatArray:
        """[num_rows, width]"""
        wanted = num_rows * width
        if self._used + wanted > len(self._noise):
            self._noise = self._rng.standard_exponential(max(self._at_once, wanted))
            self._used = 0
        start, self._used = self._used, self._used + wanted
        return self._noise[start : self._used].reshape(num_rows, width)


def make_gumbel_draw(noise: GumbelNoise) -> Draw:
    """All rows at once. The largest of log p + G is the smallest of exp(-G) / p, which needs no logarithm."""

    def draw(probs: Probs, wanted: Sequence[int]) -> list[list[int]]:
        scores = noise.take(*probs.shape) / np.maximum(probs, ALMOST_NOTHING)  # [m, K]
        order: list[list[int]] = scores.argsort(axis=1).tolist()
        return order

    return draw


def make_multinomial_draw(rng: np.random.Generator) -> Draw:
    """Row by row and token by token: draw one, strike it, draw the next."""

    def draw_row(probs: Probs, wanted: int) -> list[int]:
        left = probs.astype(np.float64)  # [K]
        order: list[int] = []
        for _ in range(min(wanted, int(np.count_nonzero(left)))):
            order.append(int(rng.choice(len(left), p=left / left.sum())))
            left[order[-1]] = 0.0
        return order

    return lambda probs, wanted: [draw_row(row, count) for row, count in zip(probs, wanted, strict=True)]


def choose_best(probs: Probs, wanted: Sequence[int]) -> list[Sequence[int]]:
    """The best entries as they stand: children are chosen."""
    return [range(probs.shape[1])] * len(probs)


def make_draw(name: str, rng: np.random.Generator) -> Draw:
    """One of DRAWS, for one request."""
    if name == "gumbel":
        return make_gumbel_draw(GumbelNoise(rng))
    return make_multinomial_draw(rng) if name == "multinomial" else choose_best


def fill_drawn(
    shape: TreeShape, size: int, root: int, context: Context, source: RowSource[Context], draw: Draw, tag: str
) -> DraftTree:
    """The first ``size`` nodes of the shape, as far as the source knows what may stand there.

    ``context`` is that of the root, and the contexts of nodes come from it by their paths.
    Of a drawn child nothing is told that depends on its token: its probability in the tree is one by rank. So whoever
    cuts the tree cuts it alike, whatever was drawn. Chosen children have their probability.
    """
    plan = plan_shape(shape, max(size, 1))
    children, num_children = plan.children, plan.num_children
    tokens = [-1] * plan.size  # by place in the shape, as all that follows
    tokens[0] = root
    contexts: list[Context | None] = [None] * plan.size
    contexts[0] = context
    parents: list[int] = []  # the places whose rows were found, level by level
    levels: list[tuple[Ids, Probs]] = []  # and these rows
    for level in plan.levels:
        reached = [place for place in level if tokens[place] >= 0]
        found, ids, probs = source.rows([contexts[place] for place in reached])  # type: ignore[misc]
        if not found:
            break
        places = [reached[index] for index in found]
        parents += places
        levels.append((ids, probs))
        order = draw(probs, [num_children[place] for place in places])
        for place, row, entries in zip(places, ids.tolist(), order, strict=True):
            for child, entry in zip(children[place], entries, strict=False):
                token = row[entry]
                if token < 0:
                    break
                tokens[child] = token
                if num_children[child]:
                    contexts[child] = source.extend_context(contexts[place], token)  # type: ignore[arg-type]
    if not parents:
        return DraftTree.root_only(root)
    proposals = dict(zip(parents, _proposals(levels), strict=True))
    if draw is choose_best:
        return _built(plan, tokens, _worth(plan, proposals), {}, tag)
    return _built(plan, tokens, plan.worth_by_rank, proposals, tag)


class ShapePlan(NamedTuple):
    """The first nodes of a shape, laid out for filling."""

    size: int
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    children: list[list[int]]
    num_children: tuple[int, ...]
    levels: list[list[int]]  # of each depth the nodes that have children
    worth_by_rank: list[float]


@lru_cache(maxsize=64)
def plan_shape(shape: TreeShape, size: int) -> ShapePlan:
    """The first ``size`` nodes; the same few are asked for again and again."""
    part = shape.first(size)
    levels = [[place for place in level if part.num_children[place]] for level in part.levels()[:-1]]
    worth = [1.0 / (1.0 + rank) for rank in part.ranks]
    return ShapePlan(len(part), part.parents, part.depths, part.children(), part.num_children, levels, worth)


def _proposals(levels: Sequence[tuple[Ids, Probs]]) -> list[Proposal]:
    """Every row as a distribution over its positive entries."""
    ids = np.concatenate([ids for ids, _ in levels]).astype(np.int64)  # [n, K]
    probs = np.concatenate([probs for _, probs in levels]).astype(np.float64)  # [n, K]
    probs /= np.maximum(probs.sum(axis=1, keepdims=True), ALMOST_NOTHING)
    sizes = np.count_nonzero(probs, axis=1).tolist()  # [n]
    width = ids.shape[1]
    return [
        Proposal(row, q) if size == width else Proposal(row[:size], q[:size])
        for row, q, size in zip(ids, probs, sizes, strict=True)
    ]


def _worth(plan: ShapePlan, rows: dict[int, Proposal]) -> list[float]:
    """The probability of every chosen child: the r-th child of a place is the r-th entry of its row."""
    worth = list(plan.worth_by_rank)
    for place, row in rows.items():
        for child, prob in zip(plan.children[place], row.probs.tolist(), strict=False):
            worth[child] = prob
    return worth


def _built(
    plan: ShapePlan, tokens: Sequence[int], worth: Sequence[float], proposals: dict[int, Proposal], tag: str
) -> DraftTree:
    """The tree of the places that got a token, in the order of the shape."""
    places = [place for place, token in enumerate(tokens) if token >= 0]
    number = dict(zip(places, range(len(places)), strict=True))
    return DraftTree(
        tokens=tuple([tokens[place] for place in places]),
        parents=(-1, *[number[plan.parents[place]] for place in places[1:]]),
        depths=tuple([plan.depths[place] for place in places]),
        sources=(ROOT_SOURCE, *(tag,) * (len(places) - 1)),
        probs=tuple([worth[place] for place in places]),
        proposals={number[place]: proposal for place, proposal in proposals.items() if len(proposal.probs)},
    )
