"""Tree sizes for ``budget="auto"``: measured costs, estimated chances, and the size that pays best."""

from draftwood.sizing.costs import CostProfile, known_costs, measure_costs, processor, save_profile, timed_contexts
from draftwood.sizing.sizer import NO_LOAD, Experience, Load, Sizer, loads_of_others
