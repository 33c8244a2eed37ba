"""Stop conditions: end tokens, stop strings and the length limit, also in the middle of an accepted block."""

from collections.abc import Sequence

from draftwood.config import SamplingParams


class _StopString:
    """Searches a growing text for one stop string (Knuth-Morris-Pratt): each character is looked at about once."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self.matched = 0  # characters at the end of the text that are the start of the stop string
        self._fallbacks = [0]  # by number of matched characters - 1: how many remain if the next one does not match
        for character in stop[1:]:
            self._fallbacks.append(self._advance(self._fallbacks[-1], character))

    def find(self, text: str) -> int | None:
        """Where the first stop string that ends in ``text`` starts; negative if it starts before ``text``."""
        for index, character in enumerate(text):
            self.matched = self._advance(self.matched, character)
            if self.matched == len(self._stop):
                return index + 1 - self.matched
        return None

    def _advance(self, matched: int, character: str) -> int:
        while matched and self._stop[matched] != character:
            matched = self._fallbacks[matched - 1]
        return matched + (self._stop[matched] == character)


class StopStrings:
    """Searches text for stop strings; holds back text that could be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [_StopString(stop) for stop in stops]
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string was found. Text after it is dropped."""
        if not self._stops:
            return text, False
        starts = [start for stop in self._stops if (start := stop.find(text)) is not None]
        before, whole = len(self._held), self._held + text
        if starts:
            self._held = ""
            return whole[: before + min(starts)], True
        keep = max(stop.matched for stop in self._stops)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], False

    def flush(self) -> str:
        """The held text, if the output ended without a stop string."""
        shown, self._held = self._held, ""
        return shown


class StopTokens:
    """End-of-text tokens of the model, stop tokens of the request, and the length limit."""

    __slots__ = ("ends", "max_tokens")

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int], max_tokens: int) -> None:
        self.ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
        self.max_tokens = max_tokens

    def first(self, token_ids: Sequence[int], num_before: int) -> tuple[int, str | None]:
        """How many of these tokens are output, after ``num_before`` others, and why it ends there; None: it goes on."""
        count, room = len(token_ids), self.max_tokens - num_before
        for place, token_id in enumerate(token_ids, start=1):
            if token_id in self.ends:
                return place, "stop"
            if place >= room:
                return place, "length"
        return count, None
