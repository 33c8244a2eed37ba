"""Drafters: named recipes of sources and growth, and the registry they are found in."""

from draftwood.drafters.base import Drafter, DraftRequest, NoOptions, PromptRows, Verified
from draftwood.drafters.checks import check_choice, check_flag, check_share, check_whole
from draftwood.drafters.memory import memory_plan
from draftwood.drafters.neural import NeuralDrafter
from draftwood.drafters.plain import PlainDrafter
from draftwood.drafters.registry import (
    DrafterFactory,
    check_drafter,
    drafter_class,
    drafter_classes,
    drafter_names,
    make_factory,
)

__all__ = [
    "DraftRequest",
    "Drafter",
    "DrafterFactory",
    "NeuralDrafter",
    "NoOptions",
    "PlainDrafter",
    "PromptRows",
    "Verified",
    "check_choice",
    "check_drafter",
    "check_flag",
    "check_share",
    "check_whole",
    "drafter_class",
    "drafter_classes",
    "drafter_names",
    "make_factory",
    "memory_plan",
]
