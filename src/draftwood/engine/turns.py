"""Whether the requests of a batch take turns: one half is drafted while the target verifies the trees of the other.

Two halves need two passes, and a pass over half as many positions takes hardly less time. So turns pay only where the
host's work for the batch takes longer than its pass: where the host waits for less than half of the time.
"""

import time
from collections.abc import Callable

MIN_REQUESTS = 8  # fewer share one pass, whose time hardly depends on their number
DECAY = 0.9  # per pass
MIN_PASSES = 8  # before the first decision, and between two
FEW, MANY = 0.45, 0.55  # shares of the time that the host waits: turns begin below the first and end above the second


class Turns:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.are_taken = False
        self._clock = clock
        self._last: float | None = None  # when the pass before was finished
        self._seconds = self._waited = 0.0  # decayed sums over passes
        self._passes = 0  # since the last decision

    def pay(self, num_requests: int) -> bool:
        return self.are_taken and num_requests >= MIN_REQUESTS

    def note(self, waited: float) -> None:
        """Counts a finished pass; ``waited``: seconds that the host waited for its answer."""
        last, self._last = self._last, self._clock()
        if last is None:
            return
        self._seconds = DECAY * self._seconds + self._last - last
        self._waited = DECAY * self._waited + waited
        self._passes += 1
        share = self._waited / max(self._seconds, 1e-9)
        if self._passes >= MIN_PASSES and (share > MANY if self.are_taken else share < FEW):
            self.are_taken = not self.are_taken
            self._passes, self._seconds, self._waited = 0, 0.0, 0.0

    def rest(self) -> None:
        """Nothing runs: the time until the next pass does not count."""
        self._last = None
