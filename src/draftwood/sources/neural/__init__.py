"""Draft models: small models and draft heads."""

from draftwood.sources.neural.base import DraftModel, DraftSegment, SearchAhead, gather_rows
from draftwood.sources.neural.build import make_head_model
from draftwood.sources.neural.model import SmallModel
