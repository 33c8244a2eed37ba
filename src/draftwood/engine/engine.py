"""The engine: takes requests, runs cycles, delivers events. One target, any number of requests and drafters.

Several callers may submit at once, from interleaved streams or threads. A caller that waits for its events runs cycles
for all requests; events stay in their request's inbox until its caller reads them.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from draftwood.compiled import set_threads
from draftwood.config import EngineOptions
from draftwood.drafters import DrafterFactory, NoOptions, PlainDrafter
from draftwood.engine.events import TokenEvent
from draftwood.engine.passes import Pass
from draftwood.engine.requests import GenerationRequest, Sample
from draftwood.engine.scheduler import Scheduler
from draftwood.engine.session import Session
from draftwood.engine.step import Finished, begin, finish, write_out
from draftwood.engine.ways import HALVES, Batch, Measured, Way, Ways
from draftwood.errors import CONTEXT_LENGTH_EXCEEDED, CapabilityError, PromptError
from draftwood.progress import Progress
from draftwood.sizing import Experience, LiveCosts, Sizer, keep_costs, known_costs, probe_costs
from draftwood.targets import Target
from draftwood.text import TextCodec


class Launched(NamedTuple):
    """A pass in flight, and how it was decided to run it."""

    run: Pass
    batch: Batch
    way: Way


class Engine:
    def __init__(
        self, target: Target, codec: TextCodec, options: EngineOptions, progress: Progress | None = None
    ) -> None:
        self.target = target
        self._codec = codec
        self._options = options
        self._scheduler = Scheduler(target, options.max_batch)
        self._costs: LiveCosts | None = None
        self._prepared = False
        self._prepared_taps = set[tuple[int, ...]]()
        self._in_flight: Launched | None = None
        self._late_error: Exception | None = None
        self._lane = 0
        self._ways = Ways()
        self._experience: WeakKeyDictionary[DrafterFactory, Experience] = WeakKeyDictionary()
        self._progress = progress
        self._next_id = 0
        self._inboxes: dict[int, deque[TokenEvent | Exception]] = {}  # by request id, from submit to the last event
        self._lock = threading.RLock()
        set_threads(torch.get_num_threads())

    @property
    def budget(self) -> int:
        """Maximum positions per pass and sequence. With ``auto``, the first use estimates costs, if none are stored."""
        if not self.target.info.can_tree:
            return 1
        if isinstance(self._options.budget, int):
            self._prepare(self._options.budget)
            return self._options.budget
        with self._lock:
            if self._costs is None:
                costs = known_costs(self.target)
                largest = costs.largest_pass(self._options.max_batch)
                self._prepare(largest)  # stored costs were measured without preparing anything
                probe_costs(self.target, costs, largest)
                self._costs = costs
            return self._costs.largest

    def _prepare(self, largest: int) -> None:
        with self._lock:
            if not self._prepared:
                self._prepared = True
                self.target.prepare(largest, self._progress)

    def _prepare_taps(self, taps: tuple[int, ...]) -> None:
        """Passes that return hidden states have to be prepared too, or trees would run in passes of other sizes."""
        with self._lock:
            if taps and taps not in self._prepared_taps:
                self.target.set_taps(taps)
                try:
                    self.target.prepare(self.budget, self._progress)  # of one request: batches have other passes
                finally:
                    self.target.set_taps(())
                self._prepared_taps.add(taps)

    @property
    def num_reserved(self) -> int:
        """Cache positions that running requests have reserved. May be read from any thread."""
        return sum(session.capacity for session in list(self._scheduler.running))

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def submit(self, request: GenerationRequest) -> list[int]:
        """Queues the ``params.n`` samples of a request; returns their request ids. The prompt is prefilled once.

        The caller must read ``events`` to the end, or ``cancel``.
        """
        self.check(request.prompt_ids)
        with self._lock:
            group, count = self._next_id + 1, request.params.n
            sessions = [self._session(request, group=group, index=index) for index in range(count)]
            for session in sessions:
                self._scheduler.add(session)
                self._inboxes[session.sample.request_id] = deque()
        return [session.sample.request_id for session in sessions]

    def events(self, request_ids: Sequence[int]) -> Iterator[TokenEvent]:
        """Yields the events of these requests until all have ended. Raises the error of one that fails."""
        unfinished = list(request_ids)
        while unfinished:
            for event in self._collect(unfinished):
                yield event
                if event.finish_reason is not None:
                    unfinished.remove(event.request_id)
                    self._inboxes.pop(event.request_id, None)

    def take_ready(self, request_ids: Iterable[int]) -> list[tuple[int, TokenEvent | Exception]]:
        """Empties the inboxes of these requests, for callers that run cycles themselves with ``step``. An error is the
        last item of its request."""
        found: list[tuple[int, TokenEvent | Exception]] = []
        with self._lock:
            for request_id in request_ids:
                inbox = self._inboxes.get(request_id)
                if not inbox:
                    continue
                found += [(request_id, what) for what in inbox]
                if any(isinstance(what, Exception) or what.finish_reason is not None for what in inbox):
                    del self._inboxes[request_id]
                else:
                    inbox.clear()
        return found

    def cancel(self, request_id: int) -> None:
        """Ends a request between two cycles and frees its cache slots. Ignores unknown and finished ones."""
        with self._lock:
            self._inboxes.pop(request_id, None)
            session = self._scheduler.find(request_id)
            if session is not None:
                session.finish_reason = "cancelled"
                self._scheduler.release(session)

    def clear(self) -> None:
        """Ends everything and frees every slot."""
        with self._lock:
            self._inboxes.clear()
            in_flight, self._in_flight, self._late_error = self._in_flight, None, None
            if in_flight is not None:
                in_flight.run.flight.wait()  # others may use the target and its lane from now on
            self._scheduler.clear()

    def keep_costs(self) -> None:
        """Stores what the passes showed about their costs, for later runs."""
        with self._lock:
            if self._costs is not None:
                keep_costs(self.target.info, self._costs)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Holds the engine between two cycles while the block runs: no drafter is active."""
        with self._lock:
            yield

    def step(self, before_wait: Callable[[], None] = lambda: None) -> None:
        """Admits requests that fit, runs one cycle, releases finished ones. Events go to the inboxes.

        ``before_wait`` is called when the host has nothing left to do until the pass has ended: other Python threads
        that are woken then do not compete with this one.
        """
        with self._lock:
            if not self._scheduler.running:
                self._ways.rest()
            self._scheduler.admit()
            self._scheduler.grow(() if self._in_flight is None else self._in_flight.run.sessions)
            if self._scheduler.has_work and not self._scheduler.running:
                raise CapabilityError(
                    "The cache has no room for any waiting request",
                    got=f"{self.target.num_slots} slots, held by others",
                    next_step="End what else runs on this target, or raise cache_tokens.",
                )
            for event in self._cycle(before_wait):
                self._deliver(event.request_id, event)
            for session in [session for session in self._scheduler.running if session.finish_reason is not None]:
                if session.error is not None:
                    self._deliver(session.sample.request_id, session.error)
                self._scheduler.release(session)

    def _cycle(self, before_wait: Callable[[], None]) -> list[TokenEvent]:
        """Runs a cycle: all of it, or with the next pass already running, where passes do not block the host.

        Where that is quicker, the drafts of one half are made while the target verifies those of the other (ways.py).
        Logits can be read only after the following pass too, so requests that read logits, or whose draft model runs on
        the same device, gain nothing and run together. Then the next pass is launched before the tokens of the last one
        are written out.
        """
        running, before = self._scheduler.running, self._in_flight
        if self.target.num_lanes == 1:
            launched = self._begin(running, before_launch=before_wait)
            return [] if launched is None else write_out(self._finish(launched))
        self._raise_late()
        if self._ways.of(self._batch()).turns:
            return self._take_turns(running, before, before_wait)
        self._in_flight = None
        launched = self._begin(running) if before is None else before
        if launched is None:
            return []
        before_wait()
        finished = self._finish(launched)
        self._run_ahead()
        return write_out(finished)

    def _take_turns(
        self, running: Sequence[Session], before: Launched | None, before_wait: Callable[[], None]
    ) -> list[TokenEvent]:
        """Launches the pass of one half, then finishes that of the other."""
        busy = set() if before is None else set(map(id, before.run.sessions))
        idle = [session for session in running if id(session) not in busy]
        half = idle[: -(-len(running) // 2)]
        self._lane = 1 - self._lane
        self._in_flight = self._begin(half, self._lane) if half else None
        before_wait()
        return [] if before is None else write_out(self._finish(before))

    def _finish(self, launched: Launched) -> Finished:
        run, batch, way = launched
        finished = finish(self.target, run)
        tokens = sum([len(each.token_ids) for each in finished.accepted])
        # Where all drafters have left, nothing is drafted until new requests come.
        have_left = any(session.has_left for session in run.sessions) and not any(
            session.may_rest and not session.has_left for session in run.sessions
        )
        counts = not (have_left and way.drafts)
        positions = sum(finished.spent.sizes)
        # Drafters that cannot come back go on reading while the batch tries to do without them.
        out = [] if way.drafts else [each for each in run.sessions if each.may_rest and not each.is_resting]
        waiting = sum([session.draft_seconds + session.learn_seconds for session in out])
        in_halves = 0.0  # only of interest where it decides whether to try turns
        if batch.may_turn and not (way.turns or finished.spent.num_read):
            halves = HALVES if self._costs is None else self._costs.compare_halves(positions)
            in_halves = halves * run.times.elapsed
        measured = Measured(tokens, finished.spent.num_read, in_halves, positions > len(run.sessions), waiting)
        self._ways.note(batch, way, measured, counts=counts)
        return finished

    def _begin(
        self, sessions: Sequence[Session], lane: int = 0, before_launch: Callable[[], None] = lambda: None
    ) -> Launched | None:
        batch = self._batch()
        way, is_trial = self._ways.of(batch), self._ways.is_trial(batch)
        num_prepared = self.target.num_prepared
        run = begin(
            self.target,
            sessions,
            lane,
            drafts=way.drafts,
            is_trial=is_trial,
            is_watched=batch.tries_without,
            before_launch=before_launch,
        )
        if run is None:
            return None
        if self.target.num_prepared != num_prepared or not all(session.was_ready for session in sessions):
            self._ways.rest()
        return Launched(run, batch, way)

    def _batch(self) -> Batch:
        """The requests that run now."""
        running = self._scheduler.running
        may_turn = self.target.num_lanes > 1 and not any(
            session.reads_logits or session.drafter.runs_model for session in running
        )
        return Batch(len(running), any(session.may_rest for session in running), may_turn)

    def _run_ahead(self) -> None:
        """Launches the next pass, unless events still read logits of the last one. Drafts of a model are made before
        it, so that what is written out afterwards takes no time where the target is the limit."""
        ended = [session for session in self._scheduler.running if session.finish_reason is not None]
        self._scheduler.grow(ended)
        sessions = [session for session in self._scheduler.running if session.finish_reason is None]
        if not sessions or any(session.events_read_logits for session in self._scheduler.running):
            return
        try:
            self._in_flight = self._begin(sessions)
        except Exception as error:  # noqa: BLE001 - raised by the next cycle: this one has tokens to deliver
            self._late_error = error

    def _raise_late(self) -> None:
        error, self._late_error = self._late_error, None
        if error is not None:
            raise error

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Raises PromptError for a prompt that cannot be completed."""
        info = self.target.info
        if not prompt_ids:
            raise PromptError("The prompt is empty", next_step="Give at least one token of text.")
        bad = next((i for i in prompt_ids if not 0 <= i < info.vocab_size), None)
        if bad is not None:
            raise PromptError("The prompt has an unknown token", got=bad, allowed=f"0 to {info.vocab_size - 1}")
        limit = self._room() - 1
        if len(prompt_ids) > limit:
            by_cache = self.target.num_slots < info.context_length
            raise PromptError(
                f"The prompt is longer than the {'cache' if by_cache else 'context of the model'}",
                got=f"{len(prompt_ids)} tokens",
                allowed=f"at most {limit}",
                next_step="Shorten it, or raise cache_tokens." if by_cache else "Shorten it, or use another model.",
                code=CONTEXT_LENGTH_EXCEEDED,
            )

    def _collect(self, request_ids: Sequence[int]) -> list[TokenEvent]:
        """Empties the inboxes; runs a cycle first if they are empty."""
        with self._lock:
            found = self._empty_inboxes(request_ids)
            if not found:
                self.step()
                found = self._empty_inboxes(request_ids)
            return found

    def _empty_inboxes(self, request_ids: Sequence[int]) -> list[TokenEvent]:
        found: list[TokenEvent] = []
        for request_id in request_ids:
            inbox = self._inboxes.get(request_id)
            if inbox is None:
                raise CapabilityError("The request was cancelled while its events were being read", got=request_id)
            while inbox:
                event = inbox.popleft()
                if isinstance(event, Exception):
                    raise event
                found.append(event)
        return found

    def _deliver(self, request_id: int, event: TokenEvent | Exception) -> None:
        if request_id in self._inboxes:
            self._inboxes[request_id].append(event)

    def _sizer(self, factory: DrafterFactory) -> Sizer | None:
        """With budget ``auto``: requests of one drafter start from what earlier ones learned."""
        if self._costs is None:
            return None
        first = Experience(is_calibrated=factory.cls.is_calibrated)
        return Sizer(self._costs, self._experience.setdefault(factory, first))

    def _room(self) -> int:
        """Maximum tokens of prompt and output together."""
        return min(self.target.info.context_length, self.target.num_slots)

    def _session(self, request: GenerationRequest, *, group: int, index: int) -> Session:
        self._next_id += 1
        sample = Sample(
            request=request,
            request_id=self._next_id,
            group=group,
            index=index,
            max_tokens=min(request.params.max_tokens, self._room() - len(request.prompt_ids)),
            budget=min(self.budget, request.budget or self.budget),
            max_capacity=self.target.num_slots,
            prefill_chunk=self._options.prefill_chunk,
        )
        drafter = request.drafter.new(group, request.owner)
        if sample.budget == 1 and drafter.wants_taps:
            # A head that is never asked for a tree needs neither the text nor the target's hidden states.
            drafter = PlainDrafter(NoOptions(), None)
        self._prepare_taps(drafter.wants_taps)
        sizer = self._sizer(request.drafter) if request.budget is None else None
        return Session(sample, drafter, self._codec, self.target.info, sizer)
