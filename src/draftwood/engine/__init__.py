"""The engine: sessions, the step, scheduling, stopping, text, statistics."""

from draftwood.engine.engine import Engine
from draftwood.engine.events import BONUS_SOURCE, TokenEvent, TokenLogprobs
from draftwood.engine.stats import RequestStats

__all__ = ["BONUS_SOURCE", "Engine", "RequestStats", "TokenEvent", "TokenLogprobs"]
