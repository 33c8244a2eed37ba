"""Drafters by name: each combines sources of guesses with a growth policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftwood.drafters.base import Drafter, DraftRequest, NoOptions, PromptRows, VerifiedBatch, VerifiedTree
from draftwood.drafters.checks import check_choice, check_flag, check_fraction, check_int
from draftwood.drafters.memory import parse_memory
from draftwood.drafters.plain import PlainDrafter
from draftwood.drafters.registry import (
    DrafterFactory,
    check_drafter,
    drafter_class,
    drafter_classes,
    drafter_names,
    make_factory,
)

if TYPE_CHECKING:
    from draftwood.drafters.neural import NeuralDrafter


def __getattr__(name: str) -> object:
    """Import neural drafters when they are used: most commands start without draft heads."""
    if name != "NeuralDrafter":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from draftwood.drafters.neural import NeuralDrafter

    return NeuralDrafter
