"""One-time measurements of a model on a machine: pass times, and the likeliest successors of each token."""

from pathlib import Path
from typing import NamedTuple

from draftwood.errors import CapabilityError
from draftwood.progress import Progress
from draftwood.sizing import CostProfile, measure_costs, save_profile, timed_contexts
from draftwood.sources import build_successors, save_successors
from draftwood.targets import Loaded

LONGER = 4  # factor: `draftwood tune` also times a context this much longer than the default ones
NEUTRAL = "\n"  # context of every token of the vocabulary


class Tuned(NamedTuple):
    """Measured costs and the file that stores them."""

    costs: CostProfile
    path: Path


def tune_costs(loaded: Loaded, progress: Progress | None = None) -> Tuned:
    """Time the model, even if the cache already has a profile."""
    contexts = timed_contexts(loaded.target.info)
    profile = measure_costs(loaded.target, (*contexts, LONGER * contexts[-1]), progress)
    if profile is None:
        raise CapabilityError("The cache is too small to time the model", got=f"{loaded.target.num_slots} slots")
    return Tuned(profile, save_profile(loaded.target.info, profile))


def tune_successors(loaded: Loaded, progress: Progress | None = None) -> Path:
    """Build the model's successor table and store it in the cache folder."""
    neutral_id = loaded.codec.encode(NEUTRAL)[-1]
    table = build_successors(loaded.target, neutral_id, progress)
    return save_successors(loaded.target.info, table)
