"""Shared by tests of sizing: artificial costs, and a simulated sizer."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.sizing.costs import SIZES, CostProfile
from draftwood.sizing.cutting import Offers
from draftwood.sizing.live import LiveCosts
from draftwood.sizing.sizer import Drafts, Experience, Load, Sizer, cut_drafted
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


def drafts_of(
    sizers: Sequence[Sizer], trees: Sequence[DraftTree], draft_seconds: float = 0.0, lesson: float = 0.0
) -> Drafts:
    """Trees without limits, one per sizer."""
    count, sizes = len(sizers), [len(tree) for tree in trees]
    offers = Offers(trees, sizes, sizes, [lesson] * count)
    return Drafts(sizers, offers, [draft_seconds] * count, [0.0] * count, [True] * count)


def cut_all(drafts: Drafts, load: Load = NO_LOAD, context: int = 16) -> list[DraftTree]:
    """Cut the trees of a batch, and note that."""
    found = cut_drafted(drafts, context, load)
    found.note()
    return found.trees


def cut(by: Sizer, tree: DraftTree, load: Load = NO_LOAD, context: int = 16, draft_seconds: float = 0.0) -> DraftTree:
    """Cut the tree of a single request."""
    drafts = drafts_of([by], [tree], draft_seconds)
    return by.cut_drawn(drafts, context, load) if tree.proposals else cut_all(drafts, load, context)[0]


def play(by: Sizer, accepted: Sequence[int], tree: DraftTree = CHAIN) -> Sizer:
    """Verify a whole chain in every cycle, with the given number of right nodes."""
    for count in accepted:
        by.note(tree, tree, [*tree.tokens[1 : count + 1], 999])
    return by
