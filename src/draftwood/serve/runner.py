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


class Job(NamedTuple):
    """The samples of one prompt, which ``Engine.check`` has let pass."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    drafter: str | None = None
    reuse: bool = False
    prediction: Sequence[int] = ()


class Ticket:
    """A job that somebody waits for."""

    def __init__(self, size: int, deliver: Deliver) -> None:
        self.size, self.deliver = size, deliver
        self.request_ids: list[int] = []
        self.is_cancelled = False


class Runner:
    """``most_requests``: that run or wait; more are refused."""

    def __init__(self, llm: LLM, most_requests: int) -> None:
        self._llm, self._engine = llm, llm.engine
        self._most = most_requests
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._owners: dict[int, tuple[Ticket, int]] = {}  # by request: its ticket, and which sample it is
        self._num_open = 0  # samples between submit and their end
        self._lock = threading.Lock()  # of that number
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="draftwood-runner", daemon=True)

    @property
    def num_open(self) -> int:
        return self._num_open

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends what still runs; whoever waits for it is told."""
        self._orders.put(self._stop)
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, job: Job, deliver: Deliver) -> Ticket:
        number = job.params.n
        with self._lock:
            if self._num_open + number > self._most:
                raise BusyError("The server is busy", got=f"{self._num_open} requests", allowed=self._most)
            self._num_open += number
        ticket = Ticket(number, deliver)
        self._orders.put(lambda: self._begin(ticket, job))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends what of it still runs; nothing more is delivered soon after. Once is as good as twice."""
        self._orders.put(lambda: self._cancel(ticket))

    def _run(self) -> None:
        while True:
            self._carry_out_orders()
            if self._is_closing:
                return
            try:
                self._engine.step()
            except Exception as error:
                LOG.exception("A cycle failed")
                self._fail_all(error)
            for request_id, what in self._engine.take_ready(list(self._owners)):
                self._tell(request_id, what)
            if not self._engine.has_work:
                self._llm.keep_memory(self._llm.factory())

    def _carry_out_orders(self) -> None:
        """All that lie there; where nothing runs, what comes next is waited for."""
        while not self._is_closing:
            try:
                order = self._orders.get(block=not self._engine.has_work)
            except Empty:
                return
            order()

    def _begin(self, ticket: Ticket, job: Job) -> None:
        if ticket.is_cancelled:
            return
        try:
            factory = self._llm.factory(job.drafter)
            ticket.request_ids = self._engine.submit(
                job.prompt_ids, job.params, factory, reuse=job.reuse, prediction=job.prediction
            )
        except Exception as error:  # noqa: BLE001 - told to the one who asked
            ticket.is_cancelled = True
            self._forget(ticket.size)
            ticket.deliver(0, error)
            return
        self._owners.update({own: (ticket, index) for index, own in enumerate(ticket.request_ids)})

    def _cancel(self, ticket: Ticket) -> None:
        if not ticket.request_ids and not ticket.is_cancelled:
            self._forget(ticket.size)  # it has not begun
        ticket.is_cancelled = True
        for request_id in ticket.request_ids:
            if self._owners.pop(request_id, None) is not None:
                self._engine.cancel(request_id)
                self._forget(1)

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
        self._engine.clear()
        for request_id in list(self._owners):
            self._tell(request_id, error)

    def _stop(self) -> None:
        self._is_closing = True
        self._fail_all(BusyError(CLOSING))

    def _forget(self, number: int) -> None:
        with self._lock:
            self._num_open -= number
