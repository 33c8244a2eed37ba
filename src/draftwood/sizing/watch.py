"""Whether drafts pay, by what they really gained.

Every drafted cycle of a request is booked in tokens: those that guesses added to the output, less those that plain
decoding emits in the time that drafting, verifying and learning took. A request that has lost ``MAX_LOSS`` pauses: it
decodes plainly for a while and tries again. A pause is twice as long as the one before, unless drafts gained
``MIN_GAIN`` in between. So where drafts do not pay and the known costs are right, little is lost; engine/ways.py
measures whole batches, whatever the known costs say. Low estimates alone do not cause a pause: drafters have to learn
before their estimates are good.

Drafts that cost much, those of a draft model, also gain much, in some cycles and nothing in others. A request may lose
more with them before it pauses, and its pauses are longer.

Requests of a batch that tries as a whole whether drafts pay draft on while they would pause. As long as a pause would
last, losses change nothing, and gains end it.

A new request takes over the balance and the pause of the last one, so that short requests also reach their ends.
"""

from __future__ import annotations

MAX_LOSS, MAX_GAIN = 1.0, 2.0  # tokens; a larger gain is forgotten, so that drafts which stop paying are noticed soon
MIN_GAIN = 1.0  # tokens after which pauses are short again: drafts that just pay for themselves gain less, by chance
MAX_PAUSE = 64  # cycles
USUAL_COST, MAX_SCALE = 0.5, 3.0  # tokens: drafts that cost more may lose and gain more, up to so many times as much


class WatchRecord:
    """What the last request of a drafter left; requests share it."""

    def __init__(self) -> None:
        self.balance = 0.0  # tokens
        self.pause = 1  # length of the next pause, in cycles
        self.pause_left = 0  # cycles left of the current pause


class Watch:
    """Watches the drafts of one request."""

    __slots__ = ("_balance", "_next_pause", "_record", "pause_left")

    def __init__(self, record: WatchRecord) -> None:
        self._record = record
        self._balance = 0.0
        self.pause_left, self._next_pause = 0, 1  # cycles

    def begin(self, *, pausing: bool) -> None:
        """``pausing``: continue a pause of earlier requests."""
        self._balance, self._next_pause = self._record.balance, self._record.pause
        self.pause_left = self._record.pause_left if pausing else 0

    @property
    def is_pausing(self) -> bool:
        return self.pause_left > 0

    def note(self, num_gained: int, cost: float | None = None) -> None:
        """The cycle is over. ``num_gained``: tokens more than a plain one emits. ``cost``: tokens that plain decoding
        emits in the time that its drafts took; None: there were none."""
        record = self._record
        if self.pause_left:
            self.pause_left = record.pause_left = self.pause_left - 1
        if cost is None:
            return
        scale = min(max(cost / USUAL_COST, 1.0), MAX_SCALE)
        self._balance = min(self._balance + num_gained - cost, MAX_GAIN * scale)
        if self._balance <= -MAX_LOSS * scale:
            self._balance = 0.0
            if not self.pause_left:
                longest = round(MAX_PAUSE * scale)
                self.pause_left = record.pause_left = min(round(self._next_pause * scale * scale), longest)
                self._next_pause = min(2 * self._next_pause, MAX_PAUSE)
        elif self._balance > MIN_GAIN * scale or not cost:
            self._next_pause, self.pause_left, record.pause_left = 1, 0, 0
        record.balance, record.pause = self._balance, self._next_pause
