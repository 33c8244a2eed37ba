"""How many levels a draft model runs below the root, where time matters: as many as gain more than they take.

A level gains the chance that the accepted path reaches it; what it takes follows from drafts with more levels and with
fewer. Now and then all levels are run, to see whether they pay again.
"""

import time
from itertools import accumulate
from operator import mul

from draftwood.growth.readings import follow_time

TRY_ALL_EVERY = 24  # drafts
RECONSIDER_EVERY = 4  # drafts: choosing takes time too
DECAY = 0.98  # per path
PRIOR_TRIES = 2.0  # weight of the belief that a level is reached as often as the one before it
FIRST_CHANCE = 0.7  # likewise, of the first level
FIXED_LEVELS = 2.0  # time of a draft beside its levels, until it is known


class Times:
    """Seconds of drafts by their number of levels, and of the rest of a cycle, for batches of about one size."""

    def __init__(self, most: int) -> None:
        self._drafts = [0.0] * (most + 1)
        self.rest = 0.0
        self.chosen = 0  # levels, the last time that they were considered
        self.num_chosen = 0  # drafts with them since then
        self.upcoming = 0  # levels of the next draft that is launched before they are considered

    def note_draft(self, levels: int, seconds: float) -> None:
        self._drafts[levels] = follow_time(self._drafts[levels], seconds)

    def note_rest(self, seconds: float) -> None:
        self.rest = follow_time(self.rest, seconds)

    def draft(self, levels: int) -> float:
        """As measured, or in proportion to the nearest number of levels that was; 0.0 if none was."""
        known = [other for other, seconds in enumerate(self._drafts) if seconds]
        if not known:
            return 0.0
        nearest = min(known, key=lambda other: abs(other - levels))
        return self._drafts[nearest] * (levels + FIXED_LEVELS) / (nearest + FIXED_LEVELS)


class LevelRecord:
    """What levels gained and took so far; all requests of a drafter share it."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._tried, self._reached = [0.0] * (most + 1), [0.0] * (most + 1)
        self._times: dict[int, Times] = {}  # by the number of requests: the power of two
        self._num_drafts = 0

    def choose(self, num_requests: int) -> int:
        """The levels of the next draft for this many requests."""
        self._num_drafts += 1
        times = self._times_of(num_requests)
        if not times.rest or self._num_drafts % TRY_ALL_EVERY == 0:
            return self.most
        times.num_chosen += 1
        if times.chosen and times.num_chosen < RECONSIDER_EVERY:
            return times.chosen
        times.num_chosen = 0
        expected = accumulate(self.chances(), initial=1.0)
        rates = [tokens / (times.rest + times.draft(levels)) for levels, tokens in enumerate(expected)]
        times.chosen = max(range(1, self.most + 1), key=rates.__getitem__)
        return times.chosen

    def chances(self) -> list[float]:
        """That the accepted path reaches level 1, 2, ..."""
        given = list[float]()
        for tried, reached in zip(self._tried[1:], self._reached[1:], strict=True):
            believed = given[-1] if given else FIRST_CHANCE
            given.append((reached + PRIOR_TRIES * believed) / (tried + PRIOR_TRIES))
        return list(accumulate(given, mul))

    def note_draft(self, num_requests: int, levels: int, seconds: float) -> None:
        self._times_of(num_requests).note_draft(levels, seconds)

    def note_rest(self, num_requests: int, seconds: float) -> None:
        """The time from a draft to the end of its cycle."""
        self._times_of(num_requests).note_rest(seconds)

    def note_path(self, levels: int, num_accepted: int) -> None:
        """Of a tree with so many levels, so many nodes below the root were accepted."""
        for level in range(1, min(levels, num_accepted + 1) + 1):
            self._tried[level] = DECAY * self._tried[level] + 1.0
            self._reached[level] = DECAY * self._reached[level] + (num_accepted >= level)

    def _times_of(self, num_requests: int) -> Times:
        return self._times.setdefault(num_requests.bit_length(), Times(self.most))


class LeveledDraft:
    """One draft for a batch with the levels that pay: how long it takes, and what comes of it."""

    def __init__(self, record: LevelRecord, num_requests: int) -> None:
        self.levels = record.choose(num_requests)
        self._record, self._num_requests = record, num_requests
        self._since = time.perf_counter()
        self._has_cycled = False

    def start(self, since: float) -> None:
        """It was launched ahead: its time begins at ``since``, the end of the last cycle, not when the host begins to
        wait. Otherwise a host that comes late would make searches seem to take no time."""
        self._since = since

    def end(self, *, counts: bool = True) -> None:
        """The trees are ready. ``counts``: later drafts will take about as long."""
        now = time.perf_counter()
        if counts:
            self._record.note_draft(self._num_requests, self.levels, now - self._since)
        self._since = now

    def note(self, num_accepted: int) -> None:
        """So many nodes of one of the trees were accepted."""
        if not self._has_cycled:
            self._has_cycled = True
            self._record.note_rest(self._num_requests, time.perf_counter() - self._since)
        self._record.note_path(self.levels, num_accepted)
