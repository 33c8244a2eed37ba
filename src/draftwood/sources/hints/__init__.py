"""Hint sources of a blend. Each looks at the end of a text and suggests what follows, with a *kind* per token: how good
such hints are is learned (growth/blend.py). The same hints exist in C (compiled/hints.h, store.h)."""

from draftwood.sources.hints.corpus import DatastoreHints
from draftwood.sources.hints.drafted import DraftedHints
from draftwood.sources.hints.positions import PositionHints
from draftwood.sources.hints.successors import SuccessorHints
from draftwood.sources.hints.text import PlaceHints
