"""How far promises are kept: tokens that were gained over tokens that were promised."""

from __future__ import annotations

TRUSTED, MAX_TRUST = 2.0, 2.0  # tokens' worth of belief that a request gains as much as those before it
RECORD_DECAY, REQUEST_DECAY = 0.99, 0.95  # per note
RECOVERY = 0.02  # of the way back to full trust


class Trust:
    """In what a draft model promises: of one request, beginning with that of those before it."""

    def __init__(self, before: Trust | None = None) -> None:
        self._before = before
        first = TRUSTED * (1.0 if before is None else before.share)
        self._gained, self._promised = first, TRUSTED  # decayed sums of tokens
        self._decay = RECORD_DECAY if before is None else REQUEST_DECAY

    @property
    def share(self) -> float:
        return min(self._gained / self._promised, MAX_TRUST)

    def recover(self) -> None:
        """Nothing was tried, perhaps for want of trust. It comes back slowly, or nothing would be tried ever again."""
        self._gained += RECOVERY * max(self._promised - self._gained, 0.0)
        if self._before is not None:
            self._before.recover()

    def note(self, promised: float, gained: float) -> None:
        self._gained = self._decay * self._gained + gained
        self._promised = self._decay * self._promised + promised
        if self._before is not None:
            self._before.note(promised, gained)
