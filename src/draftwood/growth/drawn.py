"""Static trees with sampled children: a source gives every node a distribution, its children are drawn from it.

Children are drawn without replacement and keep the order in which they were drawn, as exact verification requires.
Sorting log-probabilities plus Gumbel noise draws all children of a level at once. The number of children per node is
fixed before anything is drawn.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from draftwood.tree import ROOT_SOURCE, DraftTree, FloatArray, Proposal, TreeShape

DRAWS = ("gumbel", "multinomial", "chosen")
NOISE_BLOCK = 8192
MIN_PROB = np.float64(1e-300)  # replaces 0; far below the smallest float32, so that noise cannot lift it

Context = TypeVar("Context")
Ids = npt.NDArray[np.int32]
Probs = npt.NDArray[np.float32]
# Takes distributions [m, K] and the number of children per row [m]; returns entries of each row in the order of the
# draw: at least as many as requested, entries of probability 0 last.
Draw = Callable[[Probs, Sequence[int]], Sequence[Sequence[int]]]


class RowSource(Protocol[Context]):
    """Distributions by context; contexts are opaque to the caller."""

    def rows(self, contexts: Sequence[Context]) -> tuple[list[int], Ids, Probs]:
        """Indices of the known contexts, their tokens [m, K] and probabilities [m, K], best first. Short rows are
        padded with negative tokens of probability 0."""

    def extend_context(self, context: Context, token: int) -> Context: ...


class GumbelNoise:
    """Independent samples of exp(-G) for Gumbel noise G, which are exponentially distributed; generated in blocks.

    Each is used once: reused noise would correlate draws, and the output would no longer be exact.
    """

    def __init__(self, rng: np.random.Generator, block: int = NOISE_BLOCK) -> None:
        self._rng = rng
        self._block = block
        self._noise: FloatArray = np.empty(0)
        self._used = 0

    def take(self, num_rows: int, width: int) -> FloatArray:
        """[num_rows, width]"""
        wanted = num_rows * width
        if self._used + wanted > len(self._noise):
            self._noise = self._rng.standard_exponential(max(self._block, wanted))
            self._used = 0
        start, self._used = self._used, self._used + wanted
        return self._noise[start : self._used].reshape(num_rows, width)


def make_gumbel_draw(noise: GumbelNoise) -> Draw:
    """Draw all rows at once. Sorting exp(-G) / p upwards equals sorting log p + G downwards, without a logarithm."""

    def draw(probs: Probs, wanted: Sequence[int]) -> list[list[int]]:
        scores = noise.take(*probs.shape) / np.maximum(probs, MIN_PROB)  # [m, K]
        order: list[list[int]] = scores.argsort(axis=1).tolist()
        return order

    return draw


def make_multinomial_draw(rng: np.random.Generator) -> Draw:
    """Draw row by row and token by token: draw one, remove it, draw the next."""

    def draw_row(probs: Probs, wanted: int) -> list[int]:
        left = probs.astype(np.float64)  # [K]
        order: list[int] = []
        for _ in range(min(wanted, int(np.count_nonzero(left)))):
            order.append(int(rng.choice(len(left), p=left / left.sum())))
            left[order[-1]] = 0.0
        return order

    return lambda probs, wanted: [draw_row(row, count) for row, count in zip(probs, wanted, strict=True)]


def choose_best(probs: Probs, wanted: Sequence[int]) -> list[Sequence[int]]:
    """Take the best entries in order, without drawing."""
    return [range(probs.shape[1])] * len(probs)


def make_draw(name: str, rng: np.random.Generator) -> Draw:
    """Create one of DRAWS for one request."""
    if name == "gumbel":
        return make_gumbel_draw(GumbelNoise(rng))
    return make_multinomial_draw(rng) if name == "multinomial" else choose_best


def fill_drawn(
    shape: TreeShape, size: int, root: int, context: Context, source: RowSource[Context], draw: Draw, tag: str
) -> DraftTree:
    """Fill the first ``size`` nodes of the shape as far as the source has successors for them.

    ``context`` belongs to the root; those of the other nodes follow from their paths. The probability of a drawn child
    in the tree depends on its rank only, not on its token, so that pruning the tree cannot depend on what was drawn.
    Chosen children keep their own probability.
    """
    plan = plan_shape(shape, max(size, 1))
    children, num_children = plan.children, plan.num_children
    tokens = [-1] * plan.size  # indexed by place in the shape, as everything below
    tokens[0] = root
    contexts: list[Context | None] = [None] * plan.size
    contexts[0] = context
    parents: list[int] = []  # places with a known distribution, level by level
    levels: list[tuple[Ids, Probs]] = []  # and these distributions
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
        return _build_tree(plan, tokens, _chosen_probs(plan, proposals), {}, tag)
    return _build_tree(plan, tokens, plan.prob_by_rank, proposals, tag)


class ShapePlan(NamedTuple):
    """The first nodes of a shape, prepared for filling."""

    size: int
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    children: list[list[int]]
    num_children: tuple[int, ...]
    levels: list[list[int]]  # per depth, the nodes with children
    prob_by_rank: list[float]


@lru_cache(maxsize=64)
def plan_shape(shape: TreeShape, size: int) -> ShapePlan:
    """Prepare the first ``size`` nodes; cached, since the same few sizes are used repeatedly."""
    part = shape.first(size)
    levels = [[place for place in level if part.num_children[place]] for level in part.levels()[:-1]]
    probs_by_place = [1.0 / (1.0 + rank) for rank in part.ranks]
    return ShapePlan(len(part), part.parents, part.depths, part.children(), part.num_children, levels, probs_by_place)


def _proposals(levels: Sequence[tuple[Ids, Probs]]) -> list[Proposal]:
    """Each row as a distribution over its positive entries."""
    ids = np.concatenate([ids for ids, _ in levels]).astype(np.int64)  # [n, K]
    probs = np.concatenate([probs for _, probs in levels]).astype(np.float64)  # [n, K]
    probs /= np.maximum(probs.sum(axis=1, keepdims=True), MIN_PROB)
    sizes = np.count_nonzero(probs, axis=1).tolist()  # [n]
    width = ids.shape[1]
    return [
        Proposal(row, q) if size == width else Proposal(row[:size], q[:size])
        for row, q, size in zip(ids, probs, sizes, strict=True)
    ]


def _chosen_probs(plan: ShapePlan, rows: dict[int, Proposal]) -> list[float]:
    """Probabilities of chosen children: the r-th child of a place is the r-th entry of its row."""
    probs_by_place = list(plan.prob_by_rank)
    for place, row in rows.items():
        for child, prob in zip(plan.children[place], row.probs.tolist(), strict=False):
            probs_by_place[child] = prob
    return probs_by_place


def _build_tree(
    plan: ShapePlan, tokens: Sequence[int], probs_by_place: Sequence[float], proposals: dict[int, Proposal], tag: str
) -> DraftTree:
    """Build the tree of all places that have a token, in the order of the shape."""
    places = [place for place, token in enumerate(tokens) if token >= 0]
    number = dict(zip(places, range(len(places)), strict=True))
    return DraftTree(
        tokens=tuple([tokens[place] for place in places]),
        parents=(-1, *[number[plan.parents[place]] for place in places[1:]]),
        depths=tuple([plan.depths[place] for place in places]),
        sources=(ROOT_SOURCE, *(tag,) * (len(places) - 1)),
        probs=tuple([probs_by_place[place] for place in places]),
        proposals={number[place]: proposal for place, proposal in proposals.items() if len(proposal.probs)},
    )
