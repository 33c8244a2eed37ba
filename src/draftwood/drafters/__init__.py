"""Drafters by name: each combines sources of guesses with a growth policy."""

from draftwood.drafters.base import Drafter, DraftRequest, NoOptions, PromptRows, VerifiedTree
from draftwood.drafters.checks import check_choice, check_flag, check_fraction, check_int
from draftwood.drafters.memory import parse_memory
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
