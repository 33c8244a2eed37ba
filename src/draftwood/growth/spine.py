"""The spine tree: a reliable chain, and less reliable branches wherever the chain may break.

The chain gets its share of the budget first. The rest is divided between branches at the root and branches along the
spine, more near the root; what is left over extends the branches.

With a compiled table the tree is grown in C (compiled/growth.h), with identical results.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from draftwood.compiled import CompiledTable
from draftwood.growth.best_first import GrowthLimits, Lookup, Start, grow_best_first
from draftwood.tree import ROOT_SOURCE, DraftTree, TreeBuilder

SPINE, BRANCH = "context", "transition"


class SpineBudget(NamedTuple):
    """How to divide the budget of a spine tree."""

    spine_ratio: float  # maximum share of the budget for the spine
    spine_share: float = 0.5  # share of the remaining budget for branches along the spine; the root gets the rest
    min_score: float = 0.01  # successors with a lower score are skipped
    branch_depth: int = 6  # maximum depth of a branch below the spine
    best_first: bool = True  # leftover budget extends the likeliest branch; False: all branches, level by level
    spine_branches: bool = True


class Anchor(NamedTuple):
    """The end of the committed text."""

    previous: int  # token before the root; the root itself if there is none
    root: int


def grow_spine_tree(
    anchor: Anchor, spine: Sequence[int], trust: Sequence[float], lookup: Lookup, budget: int, plan: SpineBudget
) -> DraftTree:
    """Grow a tree; ``trust[i]`` is the probability of spine token i given those before it."""
    length = min(len(spine), _floor(budget * plan.spine_ratio), budget - 1)
    if isinstance(lookup, CompiledTable) and plan.best_first:
        return _grow_compiled(lookup, anchor, spine[:length], trust[:length], budget, plan)
    builder = TreeBuilder(anchor.root)
    lookup = cache(lookup)  # successors are needed for a node's branches and again to extend them
    starts = _lay_spine(builder, anchor, spine[:length], trust[:length])
    if not plan.spine_branches:
        del starts[1:]
    leaves: list[Start] = []
    for i, allowance in enumerate(_allowances(budget - 1 - length, len(starts) - 1, plan.spine_share)):
        if allowance:
            starts[i] = _attach(builder, starts[i], lookup, allowance, plan.min_score, leaves)
    extend = grow_best_first if plan.best_first else _grow_by_level
    limits = GrowthLimits(BRANCH, budget, plan.branch_depth, plan.min_score)
    extend(builder, [*starts, *leaves] if plan.best_first else leaves, lookup, limits)
    return builder.build(route="spine" if length else "branch")


def _grow_compiled(
    table: CompiledTable, anchor: Anchor, spine: Sequence[int], trust: Sequence[float], budget: int, plan: SpineBudget
) -> DraftTree:
    length = len(spine)
    if len(trust) != length:
        raise ValueError(f"{len(trust)} probabilities for {length} tokens")
    allowances = _allowances_in_c(budget - 1 - length, length if plan.spine_branches else 0, plan.spine_share)
    copied = array("i", spine), array("d", trust)
    nodes, probs = array("i", bytes(3 * 4 * budget)), array("d", bytes(8 * budget))  # [3, budget], [budget]
    size = table.core.spine_tree(
        table.address,
        *anchor,
        length,
        *(part.buffer_info()[0] for part in copied),
        len(allowances),
        allowances.buffer_info()[0],
        budget,
        plan.branch_depth,
        plan.min_score,
        nodes.buffer_info()[0],
        probs.buffer_info()[0],
    )
    if not size:
        raise MemoryError(f"a tree of {budget} nodes")
    return DraftTree.unchecked(
        tuple(nodes[:size]),
        tuple(nodes[budget : budget + size]),
        tuple(nodes[2 * budget : 2 * budget + size]),
        (ROOT_SOURCE, *(SPINE,) * length, *(BRANCH,) * (size - 1 - length)),
        tuple(probs[:size]),
        route="spine" if length else "branch",
    )


@lru_cache(maxsize=256)
def _allowances_in_c(free: int, length: int, spine_share: float) -> array[int]:
    return array("q", _allowances(free, length, spine_share))


@lru_cache(maxsize=256)
def _allowances(free: int, length: int, spine_share: float) -> tuple[int, ...]:
    """Number of branches for the root and for each of ``length`` spine nodes, falling with depth."""
    for_root = _floor(free * (1.0 - spine_share)) if length else free
    harmonic = sum(1.0 / i for i in range(1, length + 1))
    return (for_root, *(_floor((free - for_root) / i / harmonic) for i in range(1, length + 1)))


def _floor(number: float) -> int:
    """Round down, with tolerance for floating-point error: 10 * (1 - 0.9) gives 1."""
    return int(number + 1e-9)


def _lay_spine(builder: TreeBuilder, anchor: Anchor, spine: Sequence[int], trust: Sequence[float]) -> list[Start]:
    """Add the chain; return the root and all spine nodes as starts of branches."""
    start = Start(0, anchor.previous, anchor.root, 1.0)
    starts = [start]
    for token, chance in zip(spine, trust, strict=True):
        node = builder.add(start.node, token, SPINE, chance)
        start = Start(node, start.token, token, start.value * chance)
        starts.append(start)
    return starts


def _attach(
    builder: TreeBuilder, start: Start, lookup: Lookup, allowance: int, min_score: float, leaves: list[Start]
) -> Start:
    """Add the best successors of a node as children and leaves; return the start for its remaining successors."""
    at, previous, token, value, depth, _ = start
    tokens, scores = lookup(previous, token)
    rank = 0
    while allowance and rank < len(scores) and scores[rank] >= min_score:
        node = builder.add_new(at, tokens[rank], BRANCH, scores[rank])
        if node is not None:  # None: the spine already has this token here
            leaves.append(Start(node, token, tokens[rank], value * scores[rank], 1))
            allowance -= 1
        rank += 1
    return Start(at, previous, token, value, depth, rank)


def _grow_by_level(builder: TreeBuilder, leaves: Sequence[Start], lookup: Lookup, limits: GrowthLimits) -> None:
    """Extend level by level, likeliest leaf first. The number of children is proportional to a leaf's value."""
    source, budget, max_depth, min_score = limits
    level = sorted(leaves, key=lambda leaf: -leaf.value)
    while level and len(builder) < budget:
        below: list[Start] = []
        total = sum(leaf.value for leaf in level)
        room = budget - len(builder)
        for leaf in level:
            if leaf.depth >= max_depth or len(builder) >= budget:
                continue
            tokens, scores = lookup(leaf.previous, leaf.token)
            allowance = max(1, int(room * leaf.value / total)) if total > 0.0 else 1
            for token, score in list(zip(tokens, scores, strict=True))[:allowance]:
                if score < min_score or len(builder) >= budget:
                    break
                node = builder.add(leaf.node, token, source, score)
                below.append(Start(node, leaf.token, token, leaf.value * score, leaf.depth + 1))
        level = sorted(below, key=lambda leaf: -leaf.value)
