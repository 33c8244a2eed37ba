"""Tree sizes for ``budget="auto"``: measured costs, estimated chances, and the size that pays best."""

from draftwood.sizing.costs import CostProfile, known_costs, measure_costs, processor, save_profile, timed_contexts
from draftwood.sizing.sizer import ALONE, Experience, Load, Sizer, beside

__all__ = [
    "ALONE",
    "CostProfile",
    "Experience",
    "Load",
    "Sizer",
    "beside",
    "known_costs",
    "measure_costs",
    "processor",
    "save_profile",
    "timed_contexts",
]
