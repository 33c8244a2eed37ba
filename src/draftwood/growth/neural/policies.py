"""Growth policies for neural sources by name; the contract is in neural_base.py."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from draftwood.errors import OptionError
from draftwood.growth.drawn import Draw, choose_best
from draftwood.growth.neural.base import Frontier, Growth, GrowthOptions, GrowthSpec
from draftwood.growth.neural.ranked import BeamGrowth, RankedGrowth, SearchGrowth
from draftwood.growth.neural.shaped import ShapedGrowth
from draftwood.tree import TreeShape, chain_tree

__all__ = ["GROWTHS", "Frontier", "Growth", "GrowthOptions", "drawn_shape", "make_growth"]

GROWTHS = ("chain", "static", "beam", "optimal", "salf")
CHAIN_DEPTH = 7


def make_growth(
    name: str, root: int, budget: int, options: GrowthOptions, draw: Draw = choose_best, tag: str = "draft"
) -> Growth:
    """One of GROWTHS, for one tree of at most ``budget`` nodes, the first of which is the token ``root``.

    ``draw`` belongs to the request (`growth.drawn.make_draw`); `choose_best` chooses. ``tag`` is the nodes' source.
    """
    spec = GrowthSpec(root, budget, options, draw, tag)
    if name == "chain":
        return ShapedGrowth(spec, chain_tree(CHAIN_DEPTH if options.depth is None else options.depth))
    if name == "static":
        if options.shape is None:
            raise OptionError("A static tree needs a shape", next_step="Set GrowthOptions.shape.")
        return ShapedGrowth(spec, options.shape)
    if draw is choose_best:
        return _search(name, spec)
    return ShapedGrowth(spec, drawn_shape(name, budget, options))


@lru_cache(maxsize=256)
def drawn_shape(name: str, budget: int, options: GrowthOptions) -> TreeShape:
    """The shape that a searching policy settles on where children are drawn.

    How likely a drawn child is accepted does not follow from its own probability: where the target agrees with the
    source, the first draw is accepted whatever it is. It follows from the child's rank: a child gets its turn if those
    before it were rejected. So the policy is run with ranks instead of tokens.
    """
    growth = _search(name, GrowthSpec(0, budget, options))
    ranks = np.arange(growth.width, dtype=np.int32)  # [k]
    chances = (options.hit * (1.0 - options.hit) ** ranks).astype(np.float32)  # [k]
    while (frontier := growth.frontier()) is not None:
        size = (len(frontier.tokens), growth.width)
        growth.grow(np.broadcast_to(ranks, size), np.broadcast_to(chances, size))
    tree = growth.tree()
    return TreeShape(tree.parents, tree.tokens)


def _search(name: str, spec: GrowthSpec) -> RankedGrowth:
    if name == "beam":
        return BeamGrowth(spec)
    if name == "optimal":
        return SearchGrowth(spec, threshold=0.0)
    if name == "salf":
        return SearchGrowth(spec, spec.options.threshold)
    raise OptionError("There is no growth of that name", got=repr(name), allowed=GROWTHS)
