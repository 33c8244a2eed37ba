"""Growth policies: turn suggested tokens into a tree."""

from draftwood.growth.blend import Blend, BlendLimits, Outcome, PythonBlend, new_blend
from draftwood.growth.drawn import DRAWS, fill_drawn, make_draw
from draftwood.growth.expanding import CycleShape, ExpandingBlend, PassRecord
from draftwood.growth.prefix_tree import grow_frequency_tree
from draftwood.growth.priors import (
    NO_PRIORS,
    Priors,
    load_priors,
    new_learned,
    priors_path,
    save_priors,
    shipped_priors,
    weights_key,
)
from draftwood.growth.searched import (
    MOST_LEVELS,
    BlendedTree,
    DraftRecords,
    SearchedBlend,
    SearchedDraft,
    SearchRecord,
    search_levels,
)
from draftwood.growth.spine import BRANCH, SPINE, Anchor, SpineBudget, grow_spine_tree
from draftwood.growth.static import Candidates, fill, fill_breadth_first, lookup_candidates, spine_candidates
from draftwood.growth.trust import Trust
from draftwood.growth.worth import OwnWorth, Worth
