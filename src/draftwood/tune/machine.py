"""What a machine and a model are like: how long passes take, and which tokens follow which without any context."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from draftwood.errors import CapabilityError
from draftwood.progress import Progress
from draftwood.sizing import CostProfile, measure_costs, save_profile, timed_contexts
from draftwood.sources import build_successors, save_successors
from draftwood.targets import Loaded

LONGER = 4  # times the longest context that is timed where nobody asks for it
NEUTRAL = "\n"  # what stands before every token of the vocabulary


class Tuned(NamedTuple):
    """What was measured, and the file that keeps it."""

    costs: CostProfile
    path: Path


def tune_costs(loaded: Loaded, progress: Progress | None = None) -> Tuned:
    """Times the model anew, also where an older profile is in the cache."""
    contexts = timed_contexts(loaded.target.info)
    profile = measure_costs(loaded.target, (*contexts, LONGER * contexts[-1]), progress)
    if profile is None:
        raise CapabilityError("The cache has no room to time the model", got=f"{loaded.target.num_slots} slots")
    return Tuned(profile, save_profile(loaded.target.info, profile))


def tune_successors(loaded: Loaded, progress: Progress | None = None) -> Path:
    """Makes the model's successor table and keeps it in the cache."""
    beginning = loaded.codec.encode(NEUTRAL)[-1]
    table = build_successors(loaded.target, beginning, progress)
    return save_successors(loaded.target.info, table)
