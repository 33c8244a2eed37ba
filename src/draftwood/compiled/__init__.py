"""What drafters do in every cycle, in C: built at first use, or done without."""

from draftwood.compiled.core import CORE, Core, ExperienceRecord, GuessesRecord, RulesRecord, address_of, load_core
from draftwood.compiled.table import CompiledTable

__all__ = [
    "CORE",
    "CompiledTable",
    "Core",
    "ExperienceRecord",
    "GuessesRecord",
    "RulesRecord",
    "address_of",
    "load_core",
]
