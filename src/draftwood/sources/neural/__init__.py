"""Draft models as sources: small models and heads."""

from draftwood.sources.neural.base import DraftModel, DraftSegment
from draftwood.sources.neural.build import head_model
from draftwood.sources.neural.model import SmallModel

__all__ = ["DraftModel", "DraftSegment", "SmallModel", "head_model"]
