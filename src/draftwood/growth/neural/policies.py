"""Growth policies for draft models by name; base.py defines their interface."""

from functools import lru_cache

import numpy as np

from draftwood.errors import OptionError
from draftwood.growth.drawn import Draw, choose_best
from draftwood.growth.neural.base import Growth
from draftwood.growth.neural.ranked import BeamGrowth, RankedGrowth, SearchGrowth
from draftwood.growth.neural.search import search_shape
from draftwood.growth.neural.shaped import ShapedGrowth
from draftwood.growth.neural.spec import GrowthOptions, GrowthSpec
from draftwood.tree import TreeShape, chain_tree

GROWTHS = ("chain", "static", "beam", "optimal", "salf")
CHAIN_DEPTH = 7


def make_growth(
    name: str, root: int, budget: int, options: GrowthOptions, draw: Draw = choose_best, tag: str = "draft"
) -> Growth:
    """Create one of GROWTHS for a tree of at most ``budget`` nodes with the root token ``root``.

    ``draw`` belongs to the request (`growth.drawn.make_draw`). ``tag`` is the source name of the nodes.
    """
    spec = GrowthSpec(root, budget, options, draw, tag)
    if name == "chain":
        return _fill_shape(spec, _chain(CHAIN_DEPTH if options.depth is None else options.depth))
    if name == "static":
        if options.shape is None:
            raise OptionError("A static tree needs a shape", next_step="Set GrowthOptions.shape.")
        return _fill_shape(spec, options.shape)
    if draw is choose_best:
        return _make_search(name, spec)
    return ShapedGrowth(spec, drawn_shape(name, budget, options))


def _fill_shape(spec: GrowthSpec, shape: TreeShape) -> ShapedGrowth:
    growth = ShapedGrowth(spec, shape)
    if not growth.is_drawn:
        growth.search = search_shape(spec, shape)
    return growth


@lru_cache(maxsize=16)
def _chain(depth: int) -> TreeShape:
    return chain_tree(depth)


@lru_cache(maxsize=256)
def drawn_shape(name: str, budget: int, options: GrowthOptions) -> TreeShape:
    """The shape that a search policy uses when children are drawn.

    The acceptance of a drawn child does not depend on its probability: if the target agrees with the draft model, the
    first draw is accepted whatever it is. It depends on the rank: a child is tried only if those before it were
    rejected. So the policy is run once on ranks instead of tokens.
    """
    growth = _make_search(name, GrowthSpec(0, budget, options))
    ranks = np.arange(growth.width, dtype=np.int32)  # [k]
    chances = (options.hit * (1.0 - options.hit) ** ranks).astype(np.float32)  # [k]
    while (frontier := growth.frontier()) is not None:
        size = (len(frontier.tokens), growth.width)
        growth.grow(np.broadcast_to(ranks, size), np.broadcast_to(chances, size))
    tree = growth.tree()
    return TreeShape(tree.parents, tree.tokens)


def _make_search(name: str, spec: GrowthSpec) -> RankedGrowth:
    if name == "beam":
        return BeamGrowth(spec)
    if name == "optimal":
        return SearchGrowth(spec, threshold=0.0)
    if name == "salf":
        return SearchGrowth(spec, spec.options.threshold)
    raise OptionError("Unknown growth", got=repr(name), allowed=GROWTHS)
