"""Tree sizes for ``budget="auto"``: costs of passes, estimated chances, and the size that pays best."""

from draftwood.sizing.costs import CostProfile, measure_costs, processor, require_measured, save_profile, timed_contexts
from draftwood.sizing.cutting import Offers
from draftwood.sizing.live import LiveCosts, keep_costs, known_costs, probe_costs
from draftwood.sizing.sizer import CutDrafts, Drafts, Experience, Load, Sizer, cut_drafted, note_outcomes, note_silence
