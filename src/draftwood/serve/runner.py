"""The engine in a thread of its own: it runs cycles for everybody, and tells each request's owner what came out.

Others leave orders, which are carried out between two cycles, so nobody waits for a lock while the target runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple

from draftwood.config import SamplingParams
from draftwood.engine import TokenEvent
from draftwood.errors import DraftwoodError
from draftwood.llm import LLM

Deliver = Callable[[int, TokenEvent | Exception], None]  # (which sample of the ticket, what): in the runner's thread

CLOSING = "The server is closing"
LOG = logging.getLogger("draftwood.serve")


class BusyError(DraftwoodError):
    """There are too many requests already, or the server is closing."""


class RefusedError(Exception):
    """A job that cannot be begun; its text says why."""


class Job(NamedTuple):
    """The samples of one prompt, which ``Engine.check`` has let pass."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    drafter: str | None = None
    reuse: bool = False
    prediction: Sequence[int] = ()


class Ticket:
    """Jobs that somebody waits for: all of their samples, one after the other."""

    def __init__(self, jobs: Sequence[Job], deliver: Deliver) -> None:
        self.jobs, self.deliver = jobs, deliver
        self.size = sum(job.params.n for job in jobs)
        self.request_ids: list[int] = []
        self.is_over = False  # refused or cancelled


class Runner:
    """``most_samples``: that run or wait; more are refused."""

    def __init__(self, llm: LLM, most_samples: int) -> None:
        self._llm, self._engine = llm, llm.engine
        self._most = most_samples
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._owners: dict[int, tuple[Ticket, int]] = {}  # by request: its ticket, and which sample it is
        self._num_open = 0  # samples between submit and their end
        self._lock = threading.Lock()  # of that number
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="draftwood-runner", daemon=True)

    @property
    def num_open(self) -> int:
        return self._num_open

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends what still runs; whoever waits for it is told. Once is as good as twice."""
        self._orders.put(self._stop)
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, jobs: Sequence[Job], deliver: Deliver) -> Ticket:
        """All of them or none."""
        ticket = Ticket(jobs, deliver)
        with self._lock:
            if self._num_open + ticket.size > self._most:
                raise BusyError("The server is busy", got=f"{self._num_open} samples", allowed=self._most)
            self._num_open += ticket.size
        self._orders.put(lambda: self._begin(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends what of it still runs; nothing more is delivered soon after. Once is as good as twice."""
        self._orders.put(lambda: self._end(ticket))

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._carry_out_orders()
                if not self._is_closing:
                    self._cycle()
            except Exception as error:
                LOG.exception("A cycle failed")
                self._fail_all(error)

    def _cycle(self) -> None:
        self._engine.step()
        for request_id, what in self._engine.take_ready(list(self._owners)):
            self._tell(request_id, what)
        self._llm.keep_memory(self._llm.factory())

    def _carry_out_orders(self) -> None:
        """All that lie there; where nothing runs, what comes next is waited for."""
        while not self._is_closing:
            try:
                order = self._orders.get(block=not self._engine.has_work)
            except Empty:
                return
            order()

    def _begin(self, ticket: Ticket) -> None:
        try:
            for job in ticket.jobs if not ticket.is_over else ():
                request = self._llm.request(
                    job.prompt_ids, job.params, drafter=job.drafter, reuse=job.reuse, prediction=job.prediction
                )
                for request_id in self._engine.submit(request):
                    self._owners[request_id] = ticket, len(ticket.request_ids)
                    ticket.request_ids.append(request_id)
        except Exception as error:  # noqa: BLE001 - told to the one who asked
            self._end(ticket)
            ticket.deliver(0, RefusedError(str(error)) if isinstance(error, DraftwoodError) else error)

    def _end(self, ticket: Ticket) -> None:
        if not ticket.is_over:
            ticket.is_over = True
            self._forget(ticket.size - len(ticket.request_ids))  # those that had not begun
        for request_id in ticket.request_ids:
            if self._owners.pop(request_id, None) is not None:
                self._forget(1)
                self._engine.cancel(request_id)

    def _tell(self, request_id: int, what: TokenEvent | Exception) -> None:
        owner = self._owners.get(request_id)
        if owner is None:
            return
        if isinstance(what, Exception) or what.finish_reason is not None:
            del self._owners[request_id]
            self._forget(1)
        ticket, index = owner
        ticket.deliver(index, what)

    def _fail_all(self, error: Exception) -> None:
        for request_id in list(self._owners):
            self._tell(request_id, error)
        try:
            self._engine.clear()
        except Exception:
            LOG.exception("What ran could not be cleared away")

    def _stop(self) -> None:
        self._is_closing = True
        self._fail_all(BusyError(CLOSING))

    def _forget(self, number: int) -> None:
        with self._lock:
            self._num_open -= number
