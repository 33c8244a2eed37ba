"""Best-first growth: whichever guess is likeliest to be reached comes next.

A node's value is the product of the scores on its way, so no child is worth more than its parent and taking the best
candidate each time gives the best tree of that size. Of a node's children only the best that is not taken yet waits in
the queue: the others cannot come before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush, heapreplace
from operator import attrgetter
from typing import NamedTuple

from draftwood.tree import TreeBuilder

Successors = tuple[list[int], list[float]]  # tokens and scores, best first
Lookup = Callable[[int, int], Successors]  # by the token before and the token itself


class Start(NamedTuple):
    """A node to grow from."""

    node: int
    previous: int  # the token before it
    token: int
    value: float  # how likely the node is to be reached
    depth: int = 0  # levels below the point that ``max_depth`` counts from
    next_rank: int = 0  # its better successors are not to be added


class GrowthLimits(NamedTuple):
    """How far a tree grows, and what its new nodes are tagged with."""

    source: str
    budget: int  # nodes in all
    max_depth: int
    min_score: float  # successors below are not worth a position


def grow_best_first(builder: TreeBuilder, starts: Iterable[Start], lookup: Lookup, limits: GrowthLimits) -> None:
    """Adds nodes below the starts until the tree has ``budget`` nodes or nothing is left to add."""
    source, budget, max_depth, min_score = limits
    # The best start is the last. It is looked up when nothing in the queue is worth more than all it may lead to.
    waiting = sorted(starts, key=attrgetter("value"), reverse=True)[::-1]
    # -value, order, rank among the successors of a parent, the parent's node, token, value and depth, the successors.
    queue: list[tuple[float, int, int, int, int, float, int, list[int], list[float]]] = []
    order = 0  # the earlier of two equals goes first
    room = budget - len(builder)
    while room > 0:
        while waiting and (not queue or waiting[-1].value >= -queue[0][0]):
            parent, previous, token, value, depth, rank = waiting.pop()
            if depth < max_depth:
                tokens, scores = lookup(previous, token)
                if rank < len(scores) and scores[rank] >= min_score:
                    heappush(queue, (-value * scores[rank], order, rank, parent, token, value, depth, tokens, scores))
                    order += 1
        if not queue:
            break
        negative, _, rank, parent, previous, value, depth, tokens, scores = queue[0]
        after = rank + 1
        if after < len(scores) and scores[after] >= min_score:
            heapreplace(queue, (-value * scores[after], order, after, parent, previous, value, depth, tokens, scores))
            order += 1
        else:
            heappop(queue)
        token = tokens[rank]
        node = builder.add_new(parent, token, source, scores[rank])
        if node is None:
            continue  # whoever added it lets it grow
        room -= 1
        depth += 1
        if room and depth < max_depth:
            tokens, scores = lookup(previous, token)
            if scores and scores[0] >= min_score:
                heappush(queue, (negative * scores[0], order, 0, node, token, -negative, depth, tokens, scores))
                order += 1
