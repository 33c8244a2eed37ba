"""The engine: takes requests, runs cycles, gives events. One target, any number of requests and drafters."""

from __future__ import annotations

from collections.abc import Sequence

from draftwood.config import EngineOptions, SamplingParams
from draftwood.drafters import DrafterFactory
from draftwood.engine.budget import SIZES, CostCurve, measure_costs
from draftwood.engine.events import TokenEvent
from draftwood.engine.scheduler import Scheduler
from draftwood.engine.session import Request, Session
from draftwood.engine.step import step
from draftwood.errors import PromptError
from draftwood.target.base import Target
from draftwood.target.tokenizer import TextCodec


class Engine:
    def __init__(self, target: Target, codec: TextCodec, options: EngineOptions) -> None:
        self.target = target
        self._codec = codec
        self._options = options
        self._scheduler = Scheduler(target, options.max_batch)
        self._costs: CostCurve | None = None
        self._next_id = 0

    @property
    def budget(self) -> int:
        """Positions per pass and sequence at most. Where it was left to us, costs are measured on first use."""
        if not self.target.info.can_tree:
            return 1
        if isinstance(self._options.budget, int):
            return self._options.budget
        if self._costs is None:
            self._costs = measure_costs(self.target) if self.target.can_open(SIZES[-1]) else CostCurve((1,), (1.0,))
        return self._costs.largest

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def submit(
        self, prompt_ids: Sequence[int], params: SamplingParams, factory: DrafterFactory, *, reuse: bool = False
    ) -> list[int]:
        """Queues ``params.n`` samples of one prompt; returns their request ids. The prompt is prefilled once."""
        self._check(prompt_ids)
        group = self._next_id + 1
        for index in range(params.n):
            request = self._request(prompt_ids, params, group, index, reuse=reuse)
            self._scheduler.add(Session(request, factory.new(), self._codec, self.target.info, self._costs))
        return list(range(group, group + params.n))

    def step(self) -> list[TokenEvent]:
        """Admits who fits, runs one cycle, lets go of who finished."""
        self._scheduler.admit()
        if not self._scheduler.running:
            return []
        events = step(self.target, self._scheduler.running)
        for session in [session for session in self._scheduler.running if session.finish_reason is not None]:
            self._scheduler.release(session)
        return events

    def cancel(self, request_id: int) -> None:
        """Ends a request between two cycles; its cache slots are free at once. Unknown or finished ones are ignored."""
        session = self._scheduler.find(request_id)
        if session is not None:
            session.finish_reason = "cancelled"
            self._scheduler.release(session)

    def clear(self) -> None:
        """Ends everything and frees every slot."""
        self._scheduler.clear()

    def _request(
        self, prompt_ids: Sequence[int], params: SamplingParams, group: int, index: int, *, reuse: bool
    ) -> Request:
        self._next_id += 1
        room = min(self.target.info.context_length, self.target.num_slots - self.budget) - len(prompt_ids)
        return Request(
            request_id=self._next_id,
            prompt_ids=tuple(prompt_ids),
            params=params,
            max_tokens=min(params.max_tokens, room),
            budget=self.budget,
            prefill_chunk=self._options.prefill_chunk,
            group=group,
            index=index,
            reuse=reuse,
        )

    def _check(self, prompt_ids: Sequence[int]) -> None:
        info = self.target.info
        if not prompt_ids:
            raise PromptError("The prompt is empty", next_step="Give at least one token of text.")
        bad = next((i for i in prompt_ids if not 0 <= i < info.vocab_size), None)
        if bad is not None:
            raise PromptError("The prompt has an unknown token", got=bad, allowed=f"0 to {info.vocab_size - 1}")
        limit = min(info.context_length, self.target.num_slots - self.budget) - 1
        if len(prompt_ids) > limit:
            raise PromptError(
                "The prompt is longer than the model's context",
                got=f"{len(prompt_ids)} tokens",
                allowed=f"at most {limit} (context {info.context_length}, cache {self.target.num_slots})",
                next_step="Shorten it, or use a model with a longer context.",
            )
