"""Whether a batch drafts at all: tokens per second with drafts and without, as they are measured while it runs.

Sizes of trees are chosen by what single guesses cost (sizing/). What drafts cost a whole batch is more than their sum:
the host may become slower than the target, passes of other sizes may have to be prepared, requests may take turns. So
batches that draft decode plainly for a few passes now and then, and batches that decode plainly try drafts. The quicker
way stays, and the other one is tried again after twice the time.

Rates depend on the number of requests, so each power of two has its own. Batches of another size than before begin with
the way of the nearest one, and try the other soon.

Passes that read prompts take longer with drafts too. They come by chance, so they are counted apart: what they take
more than other passes, for each token of a prompt. As many prompt tokens as are read for each token of an answer are
then a part of what that one takes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

MIN_REQUESTS = 4  # fewer: sizes and pauses of single requests are enough
TRIAL = {True: 12, False: 8}  # passes: with drafts, without
CLEAR, MIN_CYCLES = 1.2, 96  # a trial ends early if one way is so many times quicker after so many cycles of requests
UNCOUNTED = 2  # passes after a change, which still belong to the way before
FIRST_STAY, MAX_STAY = 512, 8192  # passes until the other way is tried again
TAKEN_OVER_STAY = 128  # likewise, in a way that is taken over from another size
DECAY = 0.98  # per pass
MAX_OUTLIER = 8.0  # times the mean: a longer pass was disturbed, or had to be prepared


@dataclass(slots=True)
class Rate:
    """Decayed sums over passes."""

    tokens: float = 0.0
    seconds: float = 0.0
    passes: float = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        if self.passes >= 1.0 and seconds * self.passes > MAX_OUTLIER * self.seconds:
            return
        if seconds * self.passes * MAX_OUTLIER < self.seconds:  # the ones before were such passes
            self.tokens = self.seconds = self.passes = 0.0
        self.tokens = DECAY * self.tokens + tokens
        self.seconds = DECAY * self.seconds + seconds
        self.passes = DECAY * self.passes + 1.0

    @property
    def per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


class Choice:
    """The way of batches of one size."""

    def __init__(self, way: bool | None = None) -> None:
        """``way``: to begin with, drafts or no drafts; None: neither is known."""
        self.drafts = way is not False
        self.best = way  # the way that won the last trial
        self._is_trial = way is None
        self._left = TRIAL[True] if way is None else TAKEN_OVER_STAY  # passes until the next decision
        self._stay = FIRST_STAY
        self._uncounted = 0
        self._answering = {True: Rate(), False: Rate()}
        self._reading = {True: Rate(), False: Rate()}  # of prompts, beside answering
        self._num_read = self._num_emitted = 0.0  # decayed sums

    def note(self, num_requests: int, tokens: int, num_read: int, seconds: float) -> None:
        self._num_read = DECAY * self._num_read + num_read
        self._num_emitted = DECAY * self._num_emitted + tokens
        if self._uncounted:
            self._uncounted -= 1
            return
        rate = self._answering[self.drafts]
        if num_read:
            if rate.passes:
                self._reading[self.drafts].note(num_read, max(seconds - rate.seconds / rate.passes, 0.0))
            return
        rate.note(tokens, seconds)
        self._left -= 1
        if self._left <= 0 or (self._is_trial and self._is_clear(num_requests)):
            self._decide()

    def _is_clear(self, num_requests: int) -> bool:
        enough = TRIAL[self.drafts] - self._left >= max(MIN_CYCLES / num_requests, 3)
        if not enough or not self._answering[not self.drafts].passes:
            return False
        return not 1.0 / CLEAR < self._seconds(self.drafts) / self._seconds(not self.drafts) < CLEAR

    def _seconds(self, way: bool) -> float:
        """For each token of an answer, with the prompt tokens that are read for it."""
        reading = self._reading[way] if self._reading[way].passes else self._reading[not way]
        seconds = 1.0 / max(self._answering[way].per_second, 1e-9)
        if reading.passes:
            seconds += self._num_read / max(self._num_emitted, 1.0) * reading.seconds / reading.tokens
        return seconds

    def _decide(self) -> None:
        """After a trial the quicker way stays; after a stay the other way is tried."""
        if not self._is_trial or not self._answering[not self.drafts].passes:
            self._is_trial = True
            self._change()
            self._answering[self.drafts] = Rate()
            self._left = TRIAL[self.drafts]
            return
        self._is_trial = False
        if self._seconds(self.drafts) < self._seconds(not self.drafts):
            self._stay = FIRST_STAY
        else:
            self._stay = min(2 * self._stay, MAX_STAY)
            self._change()
        self.best = self.drafts
        self._left = self._stay

    def _change(self) -> None:
        self.drafts = not self.drafts
        self._uncounted = UNCOUNTED


class Worth:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last: float | None = None  # when the pass before was finished
        self._choices: dict[int, Choice] = {}  # by the number of requests: the power of two

    def of_drafts(self, num_requests: int) -> bool:
        """Whether a batch of this many requests should draft."""
        if num_requests < MIN_REQUESTS:
            return True
        return self._choice(num_requests).drafts

    def note(self, num_requests: int, tokens: int, num_read: int = 0, *, counts: bool) -> None:
        """A pass is finished; ``num_read``: tokens of prompts in it; ``counts``: all its requests may rest."""
        last, self._last = self._last, self._clock()
        if counts and last is not None and num_requests >= MIN_REQUESTS:
            self._choice(num_requests).note(num_requests, tokens, num_read, self._last - last)

    def rest(self) -> None:
        """Nothing runs: the time until the next pass does not count."""
        self._last = None

    def _choice(self, num_requests: int) -> Choice:
        size = num_requests.bit_length()
        if size not in self._choices:
            nearest = min(self._choices, key=lambda other: abs(other - size), default=None)
            self._choices[size] = Choice(None if nearest is None else self._choices[nearest].best)
        return self._choices[size]
