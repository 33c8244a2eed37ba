"""Best-first growth: add the guess with the highest path probability next.

A node's value is the product of the scores on its path. No child has a higher value than its parent, so adding the best
candidate each time gives the best tree of that size. The queue holds only the best remaining child of each node: the
others cannot come before it.
"""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush, heapreplace
from operator import attrgetter
from typing import NamedTuple

from draftwood.tree import TreeBuilder

Successors = tuple[list[int], list[float]]  # tokens and scores, best first
Lookup = Callable[[int, int], Successors]  # by previous token and token


class Start(NamedTuple):
    """A node to grow from."""

    node: int
    previous: int  # token before it
    token: int
    value: float  # path probability of the node
    depth: int = 0  # levels below the node where ``max_depth`` starts to count
    next_rank: int = 0  # first successor to add


class GrowthLimits(NamedTuple):
    """Limits of a tree, and the source name of its new nodes."""

    source: str
    budget: int  # total number of nodes
    max_depth: int
    min_score: float  # successors with a lower score are skipped


def grow_best_first(builder: TreeBuilder, starts: Iterable[Start], lookup: Lookup, limits: GrowthLimits) -> None:
    """Add nodes below the starts until the tree has ``budget`` nodes or no candidates are left."""
    source, budget, max_depth, min_score = limits
    # The best start is last. Its successors are looked up once no queued candidate has a higher value.
    waiting = sorted(starts, key=attrgetter("value"), reverse=True)[::-1]
    # -value, order, rank of the successor; the parent's node, token, value and depth; the parent's successors.
    queue: list[tuple[float, int, int, int, int, float, int, list[int], list[float]]] = []
    order = 0  # breaks ties: first in, first out
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
            continue  # already in the tree, where it has its own start or candidate
        room -= 1
        depth += 1
        if room and depth < max_depth:
            tokens, scores = lookup(previous, token)
            if scores and scores[0] >= min_score:
                heappush(queue, (negative * scores[0], order, 0, node, token, -negative, depth, tokens, scores))
                order += 1
