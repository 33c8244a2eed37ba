"""Scheduling: requests wait in order, are admitted when a batch row and cache slots are free, and leave when done.

A request takes room in the cache for its prompt and the next part of its answer, and more as the answer grows. If there
is none left, finished sequences are dropped, then the request that was admitted last is suspended: it gives its slots
back and goes on later, from the tokens that it has. The one that was admitted first always goes on.
"""

import logging
from collections.abc import Collection
from typing import NamedTuple

from draftwood.engine.prefix import MIN_SHARED, PrefixStore, common_prefix
from draftwood.engine.session import Session
from draftwood.targets import Target

MAX_ADMITTED_TOKENS = 8192  # of prompts and predictions in one cycle, about
MIN_GROWTH = 256  # positions that an answer gets at a time
MIN_WAIT = 64  # tokens of a prompt that another request is reading: worth waiting for
LOG = logging.getLogger(__name__)


class Donor(NamedTuple):
    """A running request that begins like another one."""

    session: Session
    shared: int  # tokens
    ready: int  # of those, in the cache
    is_sibling: bool  # another sample of the same prompt

    @property
    def is_worth_waiting_for(self) -> bool:
        return self.session.is_prefilling and self.shared - self.ready >= (1 if self.is_sibling else MIN_WAIT)


class Scheduler:
    def __init__(self, target: Target, max_batch: int) -> None:
        self._target = target
        self._max_batch = max_batch
        self._waiting: list[Session] = []
        self._running: list[Session] = []  # in the order of admission
        self._prefixes = PrefixStore(target)

    @property
    def running(self) -> list[Session]:
        return self._running

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, session: Session) -> None:
        self._waiting.append(session)

    def find(self, request_id: int) -> Session | None:
        sessions = [*self._running, *self._waiting]
        return next((session for session in sessions if session.sample.request_id == request_id), None)

    def admit(self) -> None:
        """Admits waiting requests, oldest first. A request waits while another one reads their common prompt.

        Drafters read prompts and predictions when their requests are admitted, which the running requests wait for. So
        long ones are admitted one per cycle.
        """
        room = MAX_ADMITTED_TOKENS
        for session in list(self._waiting):
            if len(self._running) >= self._max_batch or room <= 0:
                return
            donor = self._find_donor(session)
            if donor is not None and donor.is_worth_waiting_for:
                continue
            capacity = first_capacity(session)
            place = self._place(session, capacity, donor)
            if place is None:
                return  # later ones wait too, so that a large request is not overtaken for ever
            self._waiting.remove(session)
            self._running.append(session)
            session.admit(*place, capacity)
            room -= len(session.tokens) + len(session.sample.request.prediction)

    def grow(self, busy: Collection[Session] = ()) -> None:
        """Makes room for the next cycle of every running request. ``busy``: those that are in a pass."""
        crowded = [session for session in self._running if len(session.tokens) + session.budget > session.capacity]
        for session in crowded:
            if session in busy or session.is_prefilling or session.capacity >= session.sample.capacity:
                continue
            if session in self._running:  # it was not suspended meanwhile
                self._enlarge(session, next_capacity(session), busy)

    def release(self, session: Session) -> None:
        """Removes a session in any state and leaves the cache consistent."""
        if session in self._waiting:
            self._waiting.remove(session)
            if not session.was_admitted:
                return
        else:
            self._running.remove(session)
            if session.sample.request.reuse or self._is_last_copy(session):
                tokens = session.token_array[: self._target.length(session.sequence)]
                self._target.resize(session.sequence, max(len(tokens), 1))
                self._prefixes.put(tokens, session.sequence, session.sample.request.owner)
            else:
                self._target.close(session.sequence)
        if not session.has_begun:
            return
        try:
            session.drafter.end()
        except Exception:  # the request has ended; others go on
            LOG.exception("The drafter %s failed in end()", session.drafter.name)

    def clear(self) -> None:
        for session in [*self._running, *self._waiting]:
            self.release(session)
        self._prefixes.clear()

    def _find_donor(self, session: Session) -> Donor | None:
        """The running request whose prompt has most in common with this one, the last token excepted."""
        if session.drafter.needs_whole_prompt:
            return None
        own, request = session.token_array[:-1], session.sample.request
        best: Donor | None = None
        for other in self._running:
            is_sibling = other.sample.group == session.sample.group
            if not is_sibling and not (request.reuse and other.sample.request.owner == request.owner):
                continue
            shared = common_prefix(own, other.prompt_array)
            if shared >= (1 if is_sibling else MIN_SHARED) and (best is None or shared > best.shared):
                best = Donor(other, shared, min(shared, self._target.length(other.sequence)), is_sibling)
        return best

    def _is_last_copy(self, session: Session) -> bool:
        """Whether waiting samples of the same prompt would find its cache nowhere else."""
        if session.params.n == 1:
            return False
        group = session.sample.group
        waiting = any(other.sample.group == group and not other.drafter.needs_whole_prompt for other in self._waiting)
        return waiting and not any(other.sample.group == group for other in self._running)

    def _place(self, session: Session, capacity: int, donor: Donor | None) -> tuple[int, int] | None:
        """Opens a sequence for the session; returns it and how many of its tokens it holds. None: no room now."""
        request = session.sample.request
        may_reuse = request.reuse or session.sample.index > 0
        if may_reuse and not session.drafter.needs_whole_prompt:
            kept, shared = self._prefixes.find(session.token_array[:-1], request.owner)
            if kept is not None and (donor is None or shared > donor.ready):
                sequence = self._prefixes.open(kept, shared, capacity, copies=request.reuse)
                if sequence is not None:
                    return sequence, shared
        if not self._prefixes.make_room(capacity):
            return None
        if donor is not None and donor.ready:
            return self._target.fork(donor.session.sequence, capacity, donor.ready), donor.ready
        return self._target.open(capacity), 0

    def _enlarge(self, session: Session, capacity: int, busy: Collection[Session]) -> None:
        """Gives the session more room, at the cost of finished sequences and of sessions that were admitted later."""
        while not self._target.resize(session.sequence, capacity):
            if self._prefixes.drop_oldest():
                continue
            later = self._running[self._running.index(session) :]
            others = [other for other in later if other not in busy and other.can_be_suspended]
            if others and others[-1] is not session:
                self._suspend(others[-1])
            elif len(session.tokens) <= session.capacity:
                return  # it has room for a smaller tree; others may end meanwhile
            else:
                self._suspend(session)
                return
        session.capacity = capacity

    def _suspend(self, session: Session) -> None:
        self._running.remove(session)
        self._target.close(session.sequence)
        session.suspend()
        self._waiting.insert(0, session)


def first_capacity(session: Session) -> int:
    """Positions that a session gets when it is admitted."""
    return next_capacity(session) if session.can_be_suspended else session.sample.capacity


def next_capacity(session: Session) -> int:
    """Its tokens, a tree, and a part of the answer that grows with them: they are seldom moved."""
    size = len(session.tokens)
    return min(size + session.sample.budget + max(MIN_GROWTH, size // 2), session.sample.capacity)
