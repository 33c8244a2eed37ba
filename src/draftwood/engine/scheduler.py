"""Scheduling: requests wait in order, are admitted when a batch row and cache slots are free, and leave when done."""

import logging

from draftwood.engine.prefix import PrefixStore
from draftwood.engine.session import Session
from draftwood.targets import Target

KEPT_PREFIXES = 4
MAX_ADMITTED_TOKENS = 8192  # of prompts and predictions in one cycle, about
LOG = logging.getLogger(__name__)


class Scheduler:
    def __init__(self, target: Target, max_batch: int) -> None:
        self._target = target
        self._max_batch = max_batch
        self._waiting: list[Session] = []
        self._running: list[Session] = []
        self._prefixes = PrefixStore(target, KEPT_PREFIXES)

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
        """Admits waiting requests, oldest first. A sample waits while a sibling prefills their common prompt.

        Drafters read prompts and predictions when their requests are admitted, which the running requests wait for. So
        long ones are admitted one per cycle.
        """
        room = MAX_ADMITTED_TOKENS
        for session in list(self._waiting):
            if len(self._running) >= self._max_batch or room <= 0:
                return
            if any(sibling.is_prefilling for sibling in self._siblings(session)):
                continue
            place = self._place(session)
            if place is None:
                return  # later ones wait too, so that a large request is not overtaken for ever
            self._waiting.remove(session)
            self._running.append(session)
            session.admit(*place)
            room -= session.num_prompt + len(session.sample.request.prediction)

    def release(self, session: Session) -> None:
        """Removes a session in any state and leaves the cache consistent."""
        if session in self._waiting:
            self._waiting.remove(session)
            return
        self._running.remove(session)
        if session.sample.request.reuse or self._is_last_copy(session):
            length = self._target.length(session.sequence)
            self._prefixes.put(session.tokens[:length], session.sequence, session.sample.request.owner)
        else:
            self._target.close(session.sequence)
        try:
            session.drafter.end()
        except Exception:  # the request has ended; others go on
            LOG.exception("The drafter %s failed in end()", session.drafter.name)

    def clear(self) -> None:
        for session in [*self._running, *self._waiting]:
            self.release(session)
        self._prefixes.clear()

    def _siblings(self, session: Session) -> list[Session]:
        """Running samples of the same prompt; none for drafters that must see the whole prompt themselves."""
        if session.params.n == 1 or session.drafter.wants_taps:
            return []
        return [other for other in self._running if other.sample.group == session.sample.group]

    def _is_last_copy(self, session: Session) -> bool:
        """Whether waiting samples of the same prompt would find its cache nowhere else."""
        waiting = session.params.n > 1 and any(
            other.sample.group == session.sample.group and not other.drafter.wants_taps for other in self._waiting
        )
        return waiting and not self._siblings(session)

    def _place(self, session: Session) -> tuple[int, int] | None:
        """Opens a sequence for the session; returns it and how much of the prompt it holds. None: no room now."""
        capacity, prompt_ids = session.sample.capacity, session.sample.request.prompt_ids
        siblings = self._siblings(session)
        known = session.sample.request.reuse or session.sample.index > 0
        if known and not siblings and not session.drafter.wants_taps:
            found = self._prefixes.take(prompt_ids, capacity, session.sample.request.owner)
            if found is not None:
                return found
        while not self._target.can_open(capacity):
            if not self._prefixes.drop_oldest():
                return None
        if siblings:
            sequence = self._target.fork(siblings[0].sequence, capacity)
            self._target.truncate(sequence, len(prompt_ids) - 1)
            return sequence, len(prompt_ids) - 1
        return self._target.open(capacity), 0
