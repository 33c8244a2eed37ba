"""Trees with a fixed shape, filled level by level with one draft pass per level."""

from collections.abc import Sequence

from draftwood.growth.drawn import plan_shape
from draftwood.growth.neural.base import Growth
from draftwood.growth.neural.spec import GrowthSpec
from draftwood.tree import TreeShape


class ShapedGrowth(Growth):
    """`static` and `chain`: child r of a node is its r-th best successor, or its r-th draw. If there are fewer, the
    rest of the shape stays empty."""

    def __init__(self, spec: GrowthSpec, shape: TreeShape) -> None:
        self._shape = plan_shape(shape, max(spec.budget, 1))
        super().__init__(spec, width=max(self._shape.num_children))
        self._places = [0]  # place in the shape of every known node
        if self._shape.size == 1:
            self._next = []

    def _num_children(self, node: int) -> int:
        return self._shape.num_children[self._places[node]]

    def _add(self, node: int, tokens: Sequence[int], probs: Sequence[float]) -> None:
        """The probability of drawn children depends on their rank only, not on their tokens."""
        for place, token, prob in zip(self._shape.children[self._places[node]], tokens, probs, strict=False):
            self._record_node(node, token, self._shape.prob_by_rank[place] if self.is_drawn else prob)
            self._places.append(place)

    def _next_nodes(self, new: range) -> list[int]:
        return [node for node in new if self._shape.num_children[self._places[node]]]

    def _order(self) -> Sequence[int]:
        return sorted(range(len(self._places)), key=self._places.__getitem__)
