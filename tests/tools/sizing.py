"""Shared by tests of sizing: artificial costs, and a simulated sizer."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.sizing.costs import SIZES, CostProfile
from draftwood.sizing.cutting import Offer
from draftwood.sizing.live import LiveCosts
from draftwood.sizing.sizer import Drafted, Experience, Load, Sizer, cut_drafted
from draftwood.tree import DraftTree

FREE = CostProfile(SIZES, (16,), ((1.0,) * len(SIZES),))
STEEP = CostProfile((1, 2, 4, 8), (16,), ((1.0, 1.6, 2.4, 4.0),))
KNEE = CostProfile((1, 16, 32), (16,), ((1.0, 1.1, 8.0),))  # flat, then steep
HOPELESS = CostProfile((1, 2, 16), (16,), ((1.0, 3.0, 31.0),))  # no guess pays for a second position
MILD = CostProfile((1, 2, 4, 8), (16,), ((1.0, 1.3, 1.8, 3.0),))
PROFILES = {"free": FREE, "mild": MILD, "steep": STEEP, "knee": KNEE, "hopeless": HOPELESS}
NO_LOAD = Load()
CHAIN = DraftTree.chain(list(range(8)), "test")


def sizer(costs: CostProfile = STEEP, drafter: Experience | None = None) -> Sizer:
    return Sizer(LiveCosts(costs), drafter or Experience())


def cut(by: Sizer, tree: DraftTree, load: Load = NO_LOAD, context: int = 16, draft_seconds: float = 0.0) -> DraftTree:
    """Cut the tree of a single request."""
    drafted = Drafted(by, Offer(tree, len(tree), len(tree)), draft_seconds)
    return by.cut_drawn(drafted, context, load) if tree.proposals else cut_drafted([drafted], context, load)[0]


def play(by: Sizer, accepted: Sequence[int], tree: DraftTree = CHAIN) -> Sizer:
    """Verify a whole chain in every cycle, with the given number of right nodes."""
    for count in accepted:
        by.note(tree, tree, [*tree.tokens[1 : count + 1], 999])
    return by
