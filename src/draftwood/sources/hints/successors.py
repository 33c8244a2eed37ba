"""Hints from the transition table."""

from bisect import bisect
from collections.abc import Sequence
from math import sqrt

from draftwood.compiled import CompiledSource, Harvest, Hints
from draftwood.sources.transitions import TransitionTable

PROBS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.45, 0.6, 0.75, 0.88, 0.95, 0.985)  # bucket edges
TIERS = (0.8, 0.5, 0.35)  # of the probabilities after pairs, after tokens, and of the model without context: believed
NUM_PROBS, NUM_TIERS = len(PROBS) + 1, len(TIERS)
MIDDLES = tuple(sqrt(low * high) for low, high in zip((0.001, *PROBS), (*PROBS, 1.0), strict=True))  # of the buckets
PRIORS = (0.006, 0.015, 0.03, *(believed * prob for believed in TIERS for prob in MIDDLES))


class SuccessorHints:
    """What the target found likely after the last two tokens, or after the last one, when it last met them.

    Kinds: of absent tokens by tier; of the others by tier and probability.
    """

    name = "transition"
    priors: Sequence[float] = PRIORS

    def __init__(self, table: TransitionTable) -> None:
        self._table = table

    def extend(self, tokens: Sequence[int]) -> None:
        """The text is in the rows that the table learns."""

    def learn(self, seen: Harvest) -> None:
        """The drafter fills the table, which outlives the request."""

    def look(self, tail: Sequence[int], _depth: int) -> Hints | None:
        tier, (tokens, scores) = self._table.find(tail[-2] if len(tail) > 1 else tail[-1], tail[-1])
        known = [(token, score) for token, score in zip(tokens, scores, strict=True) if score > 0.0]
        if not known:
            return None
        kinds = [NUM_TIERS + tier * NUM_PROBS + bisect(PROBS, score) for _, score in known]
        return Hints([token for token, _ in known], kinds, tier)

    def compiled(self) -> CompiledSource | None:
        address = self._table.address
        return None if address is None else CompiledSource("look_successors", address)
