"""Search policies: trees of the known nodes with the highest path probabilities.

A node's value is its path probability. No child has a higher value than its parent, so the best N known nodes always
form a tree. Children are chosen, not drawn.
"""

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace

from draftwood.growth.neural.base import Growth
from draftwood.growth.neural.search import Search
from draftwood.growth.neural.spec import GrowthSpec

BEAM_DEPTH = 7


class RankedGrowth(Growth):
    """Base of the search policies: values of all nodes, and the best N of them."""

    def __init__(self, spec: GrowthSpec, max_depth: int) -> None:
        super().__init__(spec, width=min(spec.options.top_k, spec.budget - 1))
        self._max_depth = max_depth
        self._values = [1.0]  # of every known node
        self._best = [1.0]  # heap of the best N known values, N the budget
        if max_depth < 1:
            self._next = []

    def _floor(self) -> float:
        """The value that a node must exceed to be among the best N, or to have such a child."""
        return self._best[0] if len(self._best) == self._spec.budget else 0.0

    def _num_children(self, node: int) -> int:
        return self.width

    def _add(self, node: int, tokens: Sequence[int], probs: Sequence[float]) -> None:
        """Record the children that are among the best N of all known nodes."""
        best, budget, above = self._best, self._spec.budget, self._values[node]
        for token, prob in zip(tokens, probs, strict=True):
            value = above * prob
            if not value > self._floor():
                break
            if len(best) < budget:
                heappush(best, value)
            else:
                heapreplace(best, value)
            self._record_node(node, token, prob)
            self._values.append(value)

    def _order(self) -> Sequence[int]:
        """The best N known nodes. Ties keep the order in which they were added, so parents come first."""
        values = self._values
        return sorted(range(len(values)), key=lambda node: -values[node])[: max(self._spec.budget, 1)]


class BeamGrowth(RankedGrowth):
    """`beam`, as in EAGLE-2: expand the ``top_k`` best nodes of every level, down to ``depth``; the tree is the best N
    of all nodes. Nodes that cannot have a child among these are not expanded, which does not change the tree."""

    def __init__(self, spec: GrowthSpec) -> None:
        depth = spec.options.depth
        super().__init__(spec, BEAM_DEPTH if depth is None else depth)
        width, levels = spec.options.top_k, min(self._max_depth, spec.budget - 1)
        self.search = Search(spec, width, width, levels, levels - 1)

    def _next_nodes(self, new: range) -> list[int]:
        if not new or self._depths[new[0]] >= self._max_depth:
            return []
        values, floor = self._values, self._floor()
        nodes = sorted([node for node in new if values[node] > floor], key=lambda node: -values[node])
        return nodes[: self._spec.options.top_k]


class SearchGrowth(RankedGrowth):
    """`optimal` (SpecExec) and `salf`: expand the best ``batch`` unexpanded nodes at any depth, until none of those
    left can have a child among the best N. The tree is then optimal, given the ``top_k`` children of each node.

    `salf` stops as soon as the path probabilities of the next nodes sum to less than ``threshold``; these sums never
    rise. Unlike the paper's listing, which keeps only nodes taken from the queue, the tree is the best N of all known
    nodes, including those still queued. Without a threshold both are the same.
    """

    def __init__(self, spec: GrowthSpec, threshold: float) -> None:
        depth = spec.options.depth
        super().__init__(spec, spec.budget if depth is None else depth)
        self._threshold = threshold
        levels, options = min(self._max_depth, spec.budget - 1), spec.options
        self.search = Search(
            spec, options.batch, options.top_k, levels, spec.budget - 1, anywhere=True, threshold=threshold
        )
        self._queue: list[tuple[float, int]] = []  # -value and node, unexpanded
        self.sums = [1.0] if self._next else []  # total value of each frontier, ending with the one not expanded

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
