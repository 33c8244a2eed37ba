"""Growth policies for draft models: which nodes to run next, and which tree to keep."""

from draftwood.growth.neural.base import Frontier, GrowingTree
from draftwood.growth.neural.policies import GROWTHS, GrowthOptions, make_growth
from draftwood.growth.neural.ranked import BEAM_DEPTH
