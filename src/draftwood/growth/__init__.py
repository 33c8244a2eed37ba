"""Policies that turn suggestions into a tree."""

from draftwood.growth.drawn import DRAWS, fill_drawn, make_draw
from draftwood.growth.prefix_tree import frequency_tree
from draftwood.growth.spine import SPINE, Anchor, SpinePlan, spine_tree
from draftwood.growth.static import Candidates, fill, fill_breadth_first, from_lookup, with_spine

__all__ = [
    "DRAWS",
    "SPINE",
    "Anchor",
    "Candidates",
    "SpinePlan",
    "fill",
    "fill_breadth_first",
    "fill_drawn",
    "frequency_tree",
    "from_lookup",
    "make_draw",
    "spine_tree",
    "with_spine",
]
