"""Stop conditions: end tokens, stop strings and the length limit, also in the middle of an accepted block."""

from collections.abc import Sequence

from draftwood.config import SamplingParams


class StopStrings:
    """Searches text for stop strings; holds back text that could be the start of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """Text that may be shown now, and whether a stop string was found. Text after it is dropped."""
        if not self._stops:
            return text, False
        self._held += text
        cut = min((at for at in (self._held.find(stop) for stop in self._stops) if at >= 0), default=-1)
        if cut >= 0:
            shown, self._held = self._held[:cut], ""
            return shown, True
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown, False

    def flush(self) -> str:
        """The held text, if the output ended without a stop string."""
        shown, self._held = self._held, ""
        return shown

    def _overlap(self, stop: str) -> int:
        """Length of the longest suffix of the held text that is a prefix of ``stop``."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0


class StopTokens:
    """End-of-text tokens of the model, stop tokens of the request, and the length limit."""

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int], max_tokens: int) -> None:
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_token_ids))
        self._max_tokens = max_tokens

    def reason(self, token_id: int, num_output: int) -> str | None:
        """Why the output ends with this token, its ``num_output``-th, or None."""
        if token_id in self._ends:
            return "stop"
        return "length" if num_output >= self._max_tokens else None
