"""Runs the engine in a thread of its own and delivers events to the requests.

Other threads send commands, which the runner executes between two cycles. So no thread waits for a lock while the
target runs. The events of a cycle are handed over together: waking another thread costs more than its work with one.
They are handed over when the next pass begins, so that the other thread works while this one waits for the target:
before that, both would need Python's interpreter lock.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import NamedTuple

from draftwood.config import SamplingParams
from draftwood.engine import TokenEvent
from draftwood.errors import DraftwoodError
from draftwood.llm import LLM
from draftwood.serve.errors import SHUTTING_DOWN, ApiError, ServerBusyError

Result = TokenEvent | Exception
Deliver = Callable[[int, Result], None]  # (sample index in the ticket, result), in the thread of the requests

LOG = logging.getLogger("draftwood.serve")


class GenerationJob(NamedTuple):
    """The samples of one prompt. ``Engine.check`` has accepted the prompt."""

    prompt_ids: Sequence[int]
    params: SamplingParams
    drafter: str | None = None
    reuse: bool = False
    owner: str = ""  # whose cached prompts and drafts may be reused
    prediction: Sequence[int] = ()
    budget: int | None = None
    with_cycles: bool = False


class Ticket:
    """The jobs of one HTTP request. Their samples are numbered in order."""

    def __init__(self, jobs: Sequence[GenerationJob], deliver: Deliver) -> None:
        self.jobs, self.deliver = jobs, deliver
        self.num_samples = sum(job.params.n for job in jobs)
        self.request_ids: list[int] = []
        self.is_cancelled = False  # by the client, or because the engine rejected a job


Results = list[tuple[Ticket, int, Result]]
# Lets the thread of the requests call a function, as ``call_soon_threadsafe`` of an event loop does.
CallThere = Callable[[Callable[[Results], None], Results], object]


def deliver_all(results: Results) -> None:
    for ticket, index, result in results:
        ticket.deliver(index, result)


class Runner:
    """``max_samples``: limit of running and queued samples. Jobs beyond it are rejected."""

    def __init__(self, llm: LLM, max_samples: int) -> None:
        self._llm, self._engine = llm, llm.engine
        self._max_samples = max_samples
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._owners: dict[int, tuple[Ticket, int]] = {}  # by request id: its ticket and sample index
        self._results: Results = []  # to be handed over
        self._num_open = 0  # running and queued samples
        self._lock = threading.Lock()  # guards _num_open
        self._is_closing = False
        self._call_there: CallThere = lambda function, argument: function(argument)
        self._thread = threading.Thread(target=self._run, name="draftwood-runner", daemon=True)

    @property
    def num_open(self) -> int:
        return self._num_open

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, call_there: CallThere) -> None:
        self._call_there = call_there
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. Running requests get an error. Idempotent."""
        self._commands.put(self._stop)
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, jobs: Sequence[GenerationJob], deliver: Deliver) -> Ticket:
        """Queue all of the jobs, or raise ``ServerBusyError`` and queue none."""
        ticket = Ticket(jobs, deliver)
        with self._lock:
            if self._num_open + ticket.num_samples > self._max_samples:
                got = f"{self._num_open} samples"
                raise ServerBusyError("The server is busy", got=got, allowed=self._max_samples)
            self._num_open += ticket.num_samples
        self._commands.put(lambda: self._start_jobs(ticket))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel what still runs, before the next cycle. Nothing is delivered after that. Idempotent."""
        self._commands.put(lambda: self._cancel(ticket))

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._execute_commands()
                if not self._is_closing:
                    self._cycle()
            except Exception as error:
                LOG.exception("A cycle failed")
                self._fail_all(error)

    def _cycle(self) -> None:
        self._engine.step(self._hand_over)
        for request_id, result in self._engine.take_ready(list(self._owners)):
            self._deliver(request_id, result)
        if not self._engine.has_work:
            self._hand_over()
        self._llm.keep_memory(self._llm.factory())

    def _execute_commands(self) -> None:
        """Execute all queued commands. Waits for the next one if the engine has no work."""
        while not self._is_closing:
            try:
                command = self._commands.get(block=not self._engine.has_work)
            except Empty:
                return
            command()

    def _start_jobs(self, ticket: Ticket) -> None:
        try:
            for job in ticket.jobs if not ticket.is_cancelled else ():
                for request_id in self._engine.submit(self._llm.request(**job._asdict())):
                    self._owners[request_id] = ticket, len(ticket.request_ids)
                    ticket.request_ids.append(request_id)
        except Exception as error:  # noqa: BLE001 - delivered to the request
            self._cancel(ticket)
            self._results.append((ticket, 0, ApiError.wrap(error) if isinstance(error, DraftwoodError) else error))
            self._hand_over()

    def _cancel(self, ticket: Ticket) -> None:
        if not ticket.is_cancelled:
            ticket.is_cancelled = True
            self._count_ended(ticket.num_samples - len(ticket.request_ids))  # the samples that have not started
        for request_id in ticket.request_ids:
            if self._owners.pop(request_id, None) is not None:
                self._count_ended(1)
                self._engine.cancel(request_id)

    def _deliver(self, request_id: int, result: Result) -> None:
        owner = self._owners.get(request_id)
        if owner is None:
            return
        if isinstance(result, Exception) or result.finish_reason is not None:
            del self._owners[request_id]
            self._count_ended(1)
        self._results.append((*owner, result))

    def _hand_over(self) -> None:
        results, self._results = self._results, []
        if results:
            with suppress(RuntimeError):  # the event loop is closed: nothing waits for results any more
                self._call_there(deliver_all, results)

    def _fail_all(self, error: Exception) -> None:
        for request_id in list(self._owners):
            self._deliver(request_id, error)
        self._hand_over()
        try:
            self._engine.clear()
        except Exception:
            LOG.exception("The engine could not be cleared")

    def _stop(self) -> None:
        self._is_closing = True
        self._fail_all(ServerBusyError(SHUTTING_DOWN))

    def _count_ended(self, num_samples: int) -> None:
        with self._lock:
            self._num_open -= num_samples
