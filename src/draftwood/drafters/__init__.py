"""Drafters: named recipes of sources and growth, and the registry they are found in."""

from draftwood.drafters.base import Drafter, DraftRequest, NoOptions, PromptRows, Verified
from draftwood.drafters.registry import DrafterFactory, check_drafter, drafter_class, drafter_names, make_factory

__all__ = [
    "DraftRequest",
    "Drafter",
    "DrafterFactory",
    "NoOptions",
    "PromptRows",
    "Verified",
    "check_drafter",
    "drafter_class",
    "drafter_names",
    "make_factory",
]
