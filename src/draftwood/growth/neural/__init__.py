"""Growth policies for draft models: which nodes to run next, and which tree to keep."""

from draftwood.growth.neural.base import Frontier, GrowingTree
from draftwood.growth.neural.levels import LeveledDraft, LevelRecord, Times
from draftwood.growth.neural.policies import CHAIN_DEPTH, GROWTHS, make_growth
from draftwood.growth.neural.ranked import BEAM_DEPTH
from draftwood.growth.neural.search import Search
from draftwood.growth.neural.spec import GrowthOptions
