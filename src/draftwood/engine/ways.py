"""How the requests of a batch run: with drafts or without, all in one pass or in two halves that take turns.

Sizes of trees are chosen by what single guesses cost (sizing/). What drafts cost a whole batch is more than their sum:
the host may become slower than the target, passes of other sizes may have to be prepared. And where the host's work
takes as long as a pass, one half of the requests can be drafted while the target verifies the trees of the other; but
two halves need two passes, and a pass over half as many positions takes hardly less time.

So batches measure it: tokens per second of each way. The quickest stays; the others are tried again now and then, after
twice the time whenever they lose. Turns are only tried where they could gain: two halves take the target longer than
one pass for all, however quick the host is.

Drafts may gain much at the beginning of answers and little later, for all requests of a batch at once. So while they
are made, their rate is compared with those that were measured: if another way was quicker, that one is tried again.

Rates depend on the number of requests, so each power of two has its own. Batches of another size than before begin with
the way of the nearest one.

Passes that read prompts take longer with drafts too. They come by chance, so they are counted apart: what they take
more than other passes, for each token of a prompt. As many prompt tokens as are read for each token of an answer are
then a part of what that one takes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

MIN_REQUESTS = 4  # fewer: sizes and pauses of single requests are enough
MIN_IN_TURNS = 8  # fewer share one pass, whose time hardly depends on their number
HALVES = 1.5  # times as long as one pass for all: two for half of the requests, if nothing is known about that
PROMISE = 1.1  # times the best rate: what turns must promise
TRIAL = {True: 12, False: 8}  # passes: with drafts, without
NO_GUESSES = 3  # passes of a trial with drafts after which it ends early, if none of their guesses was worth verifying
CLEAR, MIN_CYCLES = 1.2, 96  # a trial ends early if one way is so many times quicker after so many cycles of requests
FADED, MIN_FADED = 1.03, 24  # another way is tried again if it was so many times quicker than the last drafts, so many
MAX_TRIAL = 4  # times as many passes, if most of them cannot be counted
UNCOUNTED = 2  # passes after a change, which still belong to the way before
FIRST_STAY, MAX_STAY = 256, 8192  # passes until another way is tried again
SOON = 64  # the same, if it lost its first trial, which compiling may have slowed
AFTER_CLEAR = 4  # times as many after a clear trial
DECAY = 0.98  # per pass
MAX_OUTLIER = 8.0  # times the mean: a longer pass was disturbed


class Way(NamedTuple):
    drafts: bool  # whether drafters may draft; False: those that may rest do
    turns: bool  # one half is drafted while the target verifies the trees of the other


TOGETHER = Way(drafts=True, turns=False)


class Batch(NamedTuple):
    """What may be chosen for the requests that run."""

    size: int
    may_rest: bool  # whether some of them may go without drafts
    may_turn: bool  # whether they may take turns

    @property
    def tries_without(self) -> bool:
        """Whether drafts are left out where that is quicker."""
        return self.may_rest and self.size >= MIN_REQUESTS

    def ways(self, turns: tuple[bool, ...]) -> tuple[Way, ...]:
        """In the order in which they are tried first."""
        halves = [each for each in turns if not each or (self.may_turn and self.size >= MIN_IN_TURNS)] or [False]
        drafts = (True, False) if self.tries_without else (True,)
        return tuple(Way(own, half) for half in halves for own in drafts)


class Measured(NamedTuple):
    """A finished pass of a batch."""

    tokens: int  # of answers that it emitted
    num_read: int  # tokens of prompts in it
    in_halves: float  # seconds of the target for two passes, each for half of the requests
    has_guesses: bool = True  # whether it verified any
    waiting: float = 0.0  # seconds that it took drafters, without drafts, to be able to come back


@dataclass(slots=True)
class Rate:
    """Decayed sums over passes."""

    tokens: float = 0.0
    seconds: float = 0.0
    in_halves: float = 0.0
    passes: float = 0.0

    def note(self, tokens: int, seconds: float, in_halves: float) -> None:
        """Adds a pass, unless it took much longer than the others."""
        if self.passes >= 1.0 and seconds * self.passes > MAX_OUTLIER * self.seconds:
            return
        if seconds * self.passes * MAX_OUTLIER < self.seconds:  # the ones before were such passes
            self.tokens = self.seconds = self.in_halves = self.passes = 0.0
        self.add(tokens, seconds, in_halves)

    def add(self, tokens: int, seconds: float, in_halves: float = 0.0) -> None:
        self.tokens = DECAY * self.tokens + tokens
        self.seconds = DECAY * self.seconds + seconds
        self.in_halves = DECAY * self.in_halves + in_halves
        self.passes = DECAY * self.passes + 1.0

    @property
    def per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


class Choice:
    """The way of batches of one size."""

    def __init__(self, ways: tuple[Way, ...], start: Way | None = None) -> None:
        """``start``: a way to begin with, taken over from another size; None: nothing is known."""
        self.way = ways[0] if start is None else start
        self.best = start  # the quickest way so far
        self.is_trial = start is None
        self._left = self._trial_length  # passes of the trial that are to be counted
        self._patience = MAX_TRIAL * self._left  # passes in all, after which a trial is given up
        self._stays = dict.fromkeys(ways, SOON)  # passes after which a way is tried again, if it loses
        self._due = dict.fromkeys(ways, 0 if start is None else FIRST_STAY)  # passes until then
        self._uncounted = 0
        self._num_without = 0  # first passes of a trial of drafts that verified no guesses
        self._answering = {way: Rate() for way in ways}
        self._reading = {way: Rate() for way in ways}  # of prompts, beside answering
        self._num_read = self._num_emitted = 0.0  # decayed sums

    def note(self, num_requests: int, measured: Measured, seconds: float) -> None:
        tokens, num_read, in_halves, has_guesses, waiting = measured
        self._num_read = DECAY * self._num_read + num_read
        self._num_emitted = DECAY * self._num_emitted + tokens
        self._patience -= 1
        if self.is_trial and self._patience <= 0 and self.best is not None:
            self._give_up(self.best)
        if self._uncounted:
            self._uncounted -= 1
            return
        rate, seconds = self._answering[self.way], max(seconds - waiting, 0.0)
        if num_read:
            if rate.passes:
                self._reading[self.way].add(num_read, max(seconds - rate.seconds / rate.passes, 0.0))
            return
        rate.note(tokens, seconds, in_halves)
        if self.is_trial:
            self._left -= 1
            self._num_without += not has_guesses
            if self._left > 0 and not (self._is_vain or self._is_clear(num_requests)):
                return
            self._decide()
        self._try_next()

    @property
    def _trial_length(self) -> int:
        return TRIAL[self.way.drafts] * (2 if self.way.turns else 1)

    @property
    def _is_vain(self) -> bool:
        """Whether drafts are tried that only take time."""
        num_tried = self._trial_length - self._left
        return self.way.drafts and self.best is not None and NO_GUESSES <= num_tried == self._num_without

    def _is_clear(self, num_requests: int) -> bool:
        num_cycles = (self._trial_length - self._left) * num_requests / (2 if self.way.turns else 1)
        if self.best is None or num_cycles < max(MIN_CYCLES, 3 * num_requests):
            return False
        if self._num_read >= 1.0 and not self._reading[self.way].passes:
            return False  # what it takes to read prompts in this way is not known
        return not 1.0 / CLEAR < self._seconds(self.way) / self._seconds(self.best) < CLEAR

    def _seconds(self, way: Way) -> float:
        """For each token of an answer, with the prompt tokens that are read for it."""
        reading = next((each for each in (self._reading[way], *self._reading.values()) if each.passes), None)
        seconds = 1.0 / max(self._answering[way].per_second, 1e-9)
        if reading is not None:
            seconds += self._num_read / max(self._num_emitted, 1.0) * reading.seconds / reading.tokens
        return seconds

    def _decide(self) -> None:
        """After a trial the quicker way stays, and the other one is tried again later."""
        self.is_trial = False
        tried, before = self.way, self.best
        if before is None:
            self.best = tried
            return
        won = not self._is_vain and self._seconds(tried) < self._seconds(before)
        self.best, lost = (tried, before) if won else (before, tried)
        stay = FIRST_STAY if won else self._stays[lost]
        self._stays[lost] = min(2 * stay, MAX_STAY)
        is_clear = self._seconds(lost) > CLEAR * self._seconds(self.best)
        self._due[lost] = min(AFTER_CLEAR * stay if is_clear else stay, MAX_STAY)
        self._change(self.best)

    def _give_up(self, best: Way) -> None:
        """Ends a trial that could not be measured, since all passes read prompts."""
        self.is_trial, self._due[self.way] = False, max(self._stays[self.way], FIRST_STAY)
        self._change(best)

    def _try_next(self) -> None:
        """Starts the next trial, if one is due."""
        if self.is_trial:
            return
        for way in self._due:
            self._due[way] -= 1
        due = [way for way, left in self._due.items() if way != self.best and (left <= 0 or self._was_quicker(way))]
        due = [way for way in due if self._may_pay(way)]
        if due:
            self._answering[due[0]] = Rate()
            self._start_trial(due[0])

    def _was_quicker(self, way: Way) -> bool:
        """Whether it was quicker when it was measured than drafts are now."""
        best = self.best
        if best is None or not best.drafts or self._answering[best].passes < MIN_FADED:
            return False
        return self._answering[way].passes > 0.0 and self._seconds(best) > FADED * self._seconds(way)

    def _may_pay(self, way: Way) -> bool:
        """Whether it might be the quickest way: turns, if they were clearly quicker with a host that takes no time.
        Trying them takes long where passes of half the requests have to be prepared."""
        together = way._replace(turns=False)
        if not way.turns or together not in self._answering or self.best is None:
            return True
        rate = self._answering[together]
        return rate.passes > 0.0 and PROMISE * rate.in_halves * self._answering[self.best].per_second < rate.tokens

    def _start_trial(self, way: Way) -> None:
        self.is_trial = True
        self._change(way)
        self._left = self._trial_length
        self._patience = MAX_TRIAL * self._left
        self._num_without = 0

    def _change(self, way: Way) -> None:
        if way != self.way:
            self.way = way
            self._uncounted = UNCOUNTED


class Ways:
    turns: tuple[bool, ...] = (False, True)  # what may be tried

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._last: float | None = None  # when the pass before was finished
        self._choices: dict[tuple[tuple[Way, ...], int], Choice] = {}  # by the number of requests: the power of two

    def of(self, batch: Batch) -> Way:
        ways = batch.ways(self.turns)
        return ways[0] if len(ways) == 1 else self._choice(ways, batch.size).way

    def is_trial(self, batch: Batch) -> bool:
        """Whether that way is only tried."""
        ways = batch.ways(self.turns)
        return len(ways) > 1 and self._choice(ways, batch.size).is_trial

    def note(self, batch: Batch, way: Way, measured: Measured, *, counts: bool = True) -> None:
        """A pass is finished, which ran for this batch in this way; ``counts``: its drafters were there."""
        last, self._last = self._last, self._clock()
        ways = batch.ways(self.turns)
        if counts and last is not None and len(ways) > 1:
            choice = self._choice(ways, batch.size)
            if choice.way == way:
                choice.note(batch.size, measured, self._last - last)

    def rest(self) -> None:
        """The time until the next pass does not count: nothing runs, or a pass is being prepared."""
        self._last = None

    def _choice(self, ways: tuple[Way, ...], num_requests: int) -> Choice:
        size = (num_requests - 1).bit_length()  # full batches, such as of 8 or 32, share one with smaller ones
        if (ways, size) not in self._choices:
            self._choices[ways, size] = Choice(ways, self._take_over(ways, size))
        return self._choices[ways, size]

    def _take_over(self, ways: tuple[Way, ...], size: int) -> Way | None:
        """The best way of the nearest size that has compared at least as much."""
        drafts = {way.drafts for way in ways}
        known = [
            (abs(other - size), best)
            for (theirs, other), choice in self._choices.items()
            if (best := choice.best) is not None and drafts <= {way.drafts for way in theirs}
        ]
        if not known:
            return None
        best = min(known)[1]
        start = best if best in ways else best._replace(turns=ways[0].turns)
        return start if start in ways else None
