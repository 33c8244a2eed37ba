"""The engine: takes requests, runs cycles, gives events. One target, any number of requests and drafters.

Requests may come from several places at once, streams that are read in turns or threads: whoever waits for its events
runs cycles for everybody, and events lie in their request's inbox until its owner fetches them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from draftwood.config import EngineOptions, SamplingParams
from draftwood.drafters import Drafter, DrafterFactory, NoOptions, PlainDrafter
from draftwood.engine.events import TokenEvent
from draftwood.engine.scheduler import Scheduler
from draftwood.engine.session import Request, Session
from draftwood.engine.step import Round, begin, finish, step
from draftwood.errors import CapabilityError, PromptError
from draftwood.progress import Progress
from draftwood.sizing import CostProfile, Experience, Sizer, known_costs
from draftwood.targets import Target
from draftwood.text import TextCodec

FEWEST_IN_TURNS = 8  # requests: fewer of them share a pass, whose time hardly depends on their number


class Engine:
    def __init__(
        self, target: Target, codec: TextCodec, options: EngineOptions, progress: Progress | None = None
    ) -> None:
        self.target = target
        self._codec = codec
        self._options = options
        self._scheduler = Scheduler(target, options.max_batch)
        self._costs: CostProfile | None = None
        self._prepared = False
        self._under_way: Round | None = None  # a pass whose answer has not been taken yet
        self._lane = 0
        self._experience: WeakKeyDictionary[DrafterFactory, Experience] = WeakKeyDictionary()
        self._progress = progress
        self._next_id = 0
        self._inboxes: dict[int, deque[TokenEvent | Exception]] = {}  # by request, from submit to its end
        self._lock = threading.RLock()

    @property
    def budget(self) -> int:
        """Positions per pass and sequence at most. Where it was left to us, costs are measured on first use."""
        if not self.target.info.can_tree:
            return 1
        if isinstance(self._options.budget, int):
            self._prepare(self._options.budget)
            return self._options.budget
        with self._lock:
            if self._costs is None:
                self._costs = known_costs(self.target, self._progress)
        largest = 1 if self._costs is None else self._costs.largest
        self._prepare(largest)  # costs that were measured another day leave it to do
        return largest

    def _prepare(self, largest: int) -> None:
        with self._lock:
            if not self._prepared:
                self._prepared = True
                self.target.prepare(largest, self._progress)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        factory: DrafterFactory,
        *,
        reuse: bool = False,
        with_text: bool = True,
        prediction: Sequence[int] = (),
    ) -> list[int]:
        """Queues ``params.n`` samples of one prompt; returns their request ids. The prompt is prefilled once.
        ``prediction``: the output that somebody expects; drafters that copy take it for text that was seen.

        Whoever submits must read ``events`` to the end, or ``cancel``. Who does not read their texts may say so: they
        are empty then, unless stop strings have to be looked for.
        """
        self.check(prompt_ids)
        with self._lock:
            group = self._next_id + 1
            requests = [
                self._request(prompt_ids, params, group, index, reuse=reuse, with_text=with_text, prediction=prediction)
                for index in range(params.n)
            ]
            sessions = [
                Session(request, _drafter(factory, request), self._codec, self.target.info, self._sizer(factory))
                for request in requests
            ]
            for session in sessions:
                self._scheduler.add(session)
                self._inboxes[session.request.request_id] = deque()
        return [request.request_id for request in requests]

    def events(self, request_ids: Sequence[int]) -> Iterator[TokenEvent]:
        """The events of these requests as they happen, until all have ended. An error of one of them is raised here."""
        unfinished = list(request_ids)
        while unfinished:
            for event in self._collect(unfinished):
                yield event
                if event.finish_reason is not None:
                    unfinished.remove(event.request_id)
                    self._inboxes.pop(event.request_id, None)

    def take_ready(self, request_ids: Iterable[int]) -> list[tuple[int, TokenEvent | Exception]]:
        """What lies in the inboxes of these requests, for one who runs cycles for many with ``step``. An error is the
        last that is heard of its request."""
        found: list[tuple[int, TokenEvent | Exception]] = []
        with self._lock:
            for request_id in request_ids:
                inbox = self._inboxes.get(request_id, ())
                found += [(request_id, what) for what in inbox]
                if any(isinstance(what, Exception) or what.finish_reason is not None for what in inbox):
                    del self._inboxes[request_id]
                elif inbox:
                    self._inboxes[request_id].clear()
        return found

    def cancel(self, request_id: int) -> None:
        """Ends a request between two cycles; its cache slots are free at once. Unknown or finished ones are ignored."""
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
            under_way, self._under_way = self._under_way, None
            if under_way is not None:
                under_way.flight.wait()  # others may use the target, and this lane of it, from now on
            self._scheduler.clear()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Between two cycles, for as long as the block lasts: no drafter runs."""
        with self._lock:
            yield

    def step(self) -> None:
        """Admits who fits, runs one cycle, lets go of who finished; events go to the inboxes."""
        with self._lock:
            self._scheduler.admit()
            if self._scheduler.has_work and not self._scheduler.running:
                raise CapabilityError(
                    "The cache has no room for any waiting request",
                    got=f"{self.target.num_slots} slots, held by others",
                    next_step="End what else runs on this target, or raise cache_tokens.",
                )
            for event in self._cycle():
                self._deliver(event.request_id, event)
            for session in [session for session in self._scheduler.running if session.finish_reason is not None]:
                if session.error is not None:
                    self._deliver(session.request.request_id, session.error)
                self._scheduler.release(session)

    def _cycle(self) -> list[TokenEvent]:
        """A cycle of everybody; of half of them in turns where they are many and passes can be under way meanwhile:
        the drafts of one half are made while the target checks those of the other. Logits can be read only when the
        pass behind them is over too, so nothing is gained where somebody reads them, or
        where a draft model runs on the same device."""
        running, before = self._scheduler.running, self._under_way
        if self.target.num_lanes == 1:
            return step(self.target, running)
        in_turns = len(running) >= FEWEST_IN_TURNS and not any(
            session.reads_logits or session.drafter.drafts_in_batch for session in running
        )
        if before is None and not in_turns:
            return step(self.target, running)
        busy = set() if before is None else {id(session) for session, _ in before.running}
        idle = [session for session in running if id(session) not in busy]
        half = idle[: -(-len(running) // 2)] if in_turns else []
        lane = 1 - self._lane
        self._under_way = begin(self.target, half, lane) if half else None
        self._lane = lane
        return [] if before is None else finish(self.target, before)

    def check(self, prompt_ids: Sequence[int]) -> None:
        """Refuses a prompt that cannot be generated from."""
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
            )

    def _collect(self, request_ids: Sequence[int]) -> list[TokenEvent]:
        """What lies in the inboxes; runs a cycle if that is nothing."""
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
        """Where the budget was left to us: requests of one drafter start from what earlier ones showed."""
        if self._costs is None:
            return None
        return Sizer(self._costs, self._experience.setdefault(factory, Experience()))

    def _room(self) -> int:
        """Tokens of prompt and output together."""
        return min(self.target.info.context_length, self.target.num_slots)

    def _request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        group: int,
        index: int,
        *,
        reuse: bool,
        with_text: bool,
        prediction: Sequence[int],
    ) -> Request:
        self._next_id += 1
        return Request(
            request_id=self._next_id,
            prompt_ids=tuple(prompt_ids),
            params=params,
            max_tokens=min(params.max_tokens, self._room() - len(prompt_ids)),
            budget=self.budget,
            max_capacity=self.target.num_slots,
            prefill_chunk=self._options.prefill_chunk,
            group=group,
            index=index,
            reuse=reuse,
            with_text=with_text,
            prediction=tuple(prediction),
        )


def _drafter(factory: DrafterFactory, request: Request) -> Drafter:
    """Its own. A head that is never asked for a tree need not read the text, nor the target show its hidden states."""
    drafter = factory.new(request.group)
    return PlainDrafter(NoOptions(), None) if request.budget == 1 and drafter.wants_taps else drafter
