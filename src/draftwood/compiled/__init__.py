"""The per-cycle work of drafters in C, compiled at first use; without a compiler, Python is used."""

from draftwood.compiled.blend import (
    NONE,
    SURE,
    TAIL,
    CompiledBlend,
    CompiledSource,
    Harvest,
    Hints,
    HintSource,
    Learned,
    name_sets,
    observe_blends,
    propose_blends,
    state_of,
)
from draftwood.compiled.chains import follow_texts
from draftwood.compiled.context import MAX_SIZES, CompiledContext, extend_contexts
from draftwood.compiled.core import CORE, Core, ExperienceRecord, RulesRecord, address_of, load_core, set_threads
from draftwood.compiled.drafted import CompiledDrafted
from draftwood.compiled.found import build_found
from draftwood.compiled.outcomes import Outcomes, OutcomesMemory
from draftwood.compiled.places import CompiledPlaces
from draftwood.compiled.positions import CompiledPositions
from draftwood.compiled.spines import (
    BYPASSES,
    MAX_SPINE,
    VOTES,
    CompiledSpines,
    SpineRules,
    observe_spines,
    propose_spines,
)
from draftwood.compiled.store import CompiledStore
from draftwood.compiled.table import CompiledTable
