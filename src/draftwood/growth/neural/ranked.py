"""Trees of the nodes with the largest path probabilities, as far as a search finds them.

A node's value is the product of the probabilities on its path, so no child is worth more than its parent, and the best
N of any set of nodes that has their parents in it are a tree. Children are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

from draftwood.growth.neural.base import Growth, GrowthSpec

BEAM_DEPTH = 7


class RankedGrowth(Growth):
    """What searches share: the values of nodes, and the best N of them."""

    def __init__(self, spec: GrowthSpec, max_depth: int) -> None:
        super().__init__(spec, width=min(spec.options.top_k, spec.budget - 1))
        self._max_depth = max_depth
        self._values = [1.0]  # of every known node
        self._best = [1.0]  # a heap of the best values known, as many as the budget has room for
        if max_depth < 1:
            self._next = []

    def _floor(self) -> float:
        """What a node must be worth more than to be one of the best N, or to have a child that is."""
        return self._best[0] if len(self._best) == self._spec.budget else 0.0

    def _num_children(self, node: int) -> int:
        return self.width

    def _add(self, node: int, tokens: Sequence[int], probs: Sequence[float]) -> None:
        """Those that are among the best N of all known nodes."""
        best, budget, above = self._best, self._spec.budget, self._values[node]
        for token, prob in zip(tokens, probs, strict=True):
            value = above * prob
            if not value > self._floor():
                break
            if len(best) < budget:
                heappush(best, value)
            else:
                heapreplace(best, value)
            self._note(node, token, prob)
            self._values.append(value)

    def _order(self) -> Sequence[int]:
        """The best N of all known nodes. Equals stay in the order they became known in: parents come first."""
        values = self._values
        return sorted(range(len(values)), key=lambda node: -values[node])[: max(self._spec.budget, 1)]


class BeamGrowth(RankedGrowth):
    """`beam`, as in EAGLE-2: of every level the ``top_k`` best nodes are expanded, down to ``depth``; the tree is the
    best N of all. Nodes none of whose children could be among them are not expanded, which changes nothing else."""

    def __init__(self, spec: GrowthSpec) -> None:
        depth = spec.options.depth
        super().__init__(spec, BEAM_DEPTH if depth is None else depth)

    def _next_nodes(self, new: range) -> list[int]:
        if not new or self._depths[new[0]] >= self._max_depth:
            return []
        values, floor = self._values, self._floor()
        nodes = sorted([node for node in new if values[node] > floor], key=lambda node: -values[node])
        return nodes[: self._spec.options.top_k]


class SearchGrowth(RankedGrowth):
    """`optimal` (SpecExec) and `salf`: the best ``batch`` unexpanded nodes are expanded, wherever they are, until none
    of those that wait can have a child among the best N. Then the tree is the best there is, as far as the ``top_k``
    children of a node tell.

    `salf` stops as soon as the path probabilities of the nodes that would be expanded sum up to less than
    ``threshold``; these sums never rise. What waited then is known all the same, and a guess like others: the tree is
    the best N of all known nodes, and not of those alone that were taken from the queue, with which the paper's listing
    ends. Without a threshold both are the same.
    """

    def __init__(self, spec: GrowthSpec, threshold: float) -> None:
        depth = spec.options.depth
        super().__init__(spec, spec.budget if depth is None else depth)
        self._threshold = threshold
        self._queue: list[tuple[float, int]] = []  # -value and node, unexpanded
        self.sums = [1.0] if self._next else []  # of the values of each frontier; the last one is that of the stop

    def _next_nodes(self, new: range) -> list[int]:
        depths, values, queue = self._depths, self._values, self._queue
        for node in new:
            if depths[node] < self._max_depth:
                heappush(queue, (-values[node], node))
        batch = [heappop(queue)[1] for _ in range(min(self._spec.options.batch, len(queue)))]
        floor = self._floor()
        nodes = [node for node in batch if values[node] > floor]
        self.sums.append(sum([values[node] for node in nodes]))
        return nodes if self.sums[-1] >= self._threshold else []
