"""The front door: a model, a drafter, and text.

llm = LLM("smollm2", drafter="blend")
print(llm.generate("Write a haiku about trees.")[0].text)
"""

import operator
import os
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from draftwood.config import (
    DEFAULT_DRAFTER,
    DEFAULT_MEMORY,
    DEFAULT_MODEL,
    PREFILL_CHUNK,
    EngineOptions,
    ModelOptions,
    SamplingParams,
    from_mapping,
)
from draftwood.drafters import Drafter, DrafterFactory, check_drafter, make_factory, parse_memory
from draftwood.engine import Engine, GenerationRequest, RequestStats, TokenEvent, TokenLogprobs
from draftwood.errors import OptionError, PromptError
from draftwood.progress import Progress
from draftwood.structured import Structure, StructureCompiler
from draftwood.targets import Loaded, Target, TargetInfo, load_target
from draftwood.text import TextCodec

Prompt = str | Sequence[int]  # text, or token ids
Message = Mapping[str, str]  # {"role": ..., "content": ...}
DrafterLike = str | type[Drafter]  # a registered name, or a class


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One finished sample."""

    prompt_index: int  # which of the prompts
    index: int  # which of its ``n`` samples
    text: str
    token_ids: list[int]
    texts: list[str]  # the text each token made certain; joined they are ``text``
    sources: list[str]  # which source drafted each token; "target": the target itself
    finish_reason: str  # "stop", "length" or "cancelled"
    stats: RequestStats
    logprobs: list[TokenLogprobs] | None  # one per token, if requested


class LLM:
    """A loaded model that generates. It holds the KV cache until ``close`` or the end of a ``with`` block."""

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        drafter: DrafterLike = DEFAULT_DRAFTER,
        drafter_options: Mapping[str, Any] | None = None,
        memory: str | Path = DEFAULT_MEMORY,
        budget: int | str = "auto",
        progress: Progress | None = None,
        **loading: Any,
    ) -> None:
        """Loads a model.

        ``memory``: who shares what drafters learn: "request", "prompt", "process", or a file to keep it in.
        ``loading``: further fields of ``ModelOptions``: ``dtype``, ``quantize``, ``exact``, ``device``, ``target``,
        ``max_batch``, ``cache_tokens``.
        """
        chosen = from_mapping(ModelOptions, {"model": model, **loading}, "LLM")
        options = EngineOptions(budget=budget, max_batch=chosen.max_batch)
        check_drafter(drafter, drafter_options)  # a typing error should not wait for a model to load
        parse_memory(memory)
        self._setup(load_target(chosen, progress), drafter, drafter_options, memory, options, progress)

    @classmethod
    def from_target(
        cls,
        target: Target,
        codec: TextCodec,
        *,
        drafter: DrafterLike = DEFAULT_DRAFTER,
        drafter_options: Mapping[str, Any] | None = None,
        memory: str | Path = DEFAULT_MEMORY,
        budget: int | str = "auto",
        max_batch: int = 8,
        prefill_chunk: int = PREFILL_CHUNK,
    ) -> Self:
        """Wraps a target that is loaded already. Several may use one target, but not at the same time."""
        llm = cls.__new__(cls)
        options = EngineOptions(budget=budget, max_batch=max_batch, prefill_chunk=prefill_chunk)
        llm._setup(Loaded(target, codec), drafter, drafter_options, memory, options)
        return llm

    def _setup(
        self,
        loaded: Loaded,
        drafter: DrafterLike,
        drafter_options: Mapping[str, Any] | None,
        memory: str | Path,
        options: EngineOptions,
        progress: Progress | None = None,
    ) -> None:
        target, self.tokenizer = loaded
        self._scope = parse_memory(memory).scope  # a memory file belongs to one drafter, its scope to all
        self._engine = Engine(target, self.tokenizer, options, progress)
        self._structures = StructureCompiler(self.tokenizer, target.info.vocab_size, target.info.eos_token_ids)
        self._default = make_factory(drafter, drafter_options, target, memory, self.tokenizer)
        self._factories: dict[DrafterLike, DrafterFactory] = {drafter: self._default}
        self._loading = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancels running requests, frees the cache, and saves what was learned: the drafter's memory, if it has a
        file, and the costs of passes."""
        self._engine.clear()
        self._engine.keep_costs()
        with self._engine.at_rest():
            self._default.memory.save()

    @property
    def info(self) -> TargetInfo:
        """Facts about the loaded model."""
        return self._engine.target.info

    @property
    def engine(self) -> Engine:
        """The engine, for callers that submit requests and collect events themselves."""
        return self._engine

    @property
    def drafter(self) -> str:
        """The name of the default drafter."""
        return self._default.name

    @property
    def budget(self) -> int:
        """Positions per verification pass, the root included."""
        return self._engine.budget

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        *,
        drafter: DrafterLike | None = None,
        prediction: str | None = None,
    ) -> list[Completion]:
        """Completes texts as they are. Results come in the order of the prompts, the ``n`` samples of each together.

        ``drafter`` replaces the drafter for this call, with its default options.
        ``prediction`` is the output that you expect, such as a text with few changes: drafters that copy text find it
        there. It affects only the speed.
        """
        prompt_ids = [self._encode(prompt) for prompt in _as_list(prompts)]
        return self._run([self.request(ids, params, drafter=drafter, prediction=prediction) for ids in prompt_ids])

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        *,
        drafter: DrafterLike | None = None,
        prediction: str | None = None,
    ) -> list[Completion]:
        """Answers one conversation or several through the model's chat template. The cache of earlier turns is reused.

        Results come in the order of the conversations, the ``n`` samples of each together.
        """
        prompts = [self.tokenizer.apply_chat(conversation) for conversation in _conversations(messages)]
        return self._run(
            [self.request(ids, params, drafter=drafter, prediction=prediction, reuse=True) for ids in prompts]
        )

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: DrafterLike | None = None,
        prediction: str | None = None,
        reuse: bool = False,
    ) -> Generator[TokenEvent, None, None]:
        """Yields token events of one completion as blocks are accepted. Leaving the loop early cancels the request.

        ``reuse``: keep the cache for a request that continues this one, and use that of an earlier one.
        """
        ids = self._encode(prompt)
        return self._stream(self.request(ids, params, drafter=drafter, prediction=prediction, reuse=reuse))

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        drafter: DrafterLike | None = None,
        prediction: str | None = None,
    ) -> Generator[TokenEvent, None, None]:
        """As ``stream``, for a conversation."""
        prompt_ids = self.tokenizer.apply_chat(messages)
        return self._stream(self.request(prompt_ids, params, drafter=drafter, prediction=prediction, reuse=True))

    def request(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        drafter: DrafterLike | None = None,
        prediction: str | Sequence[int] | None = None,
        reuse: bool = False,
        owner: str = "",
        budget: int | None = None,
        with_cycles: bool = False,
    ) -> GenerationRequest:
        """A request for ``engine.submit``, for callers that run cycles themselves.

        Requests of one ``owner`` reuse each other's cache and memory, but not those of other owners. ``budget``: a
        fixed number of positions per pass, at most those of the engine. ``with_cycles``: events have a ``detail``.
        """
        if params is not None and not isinstance(params, SamplingParams):
            raise OptionError("params must be SamplingParams", got=type(params).__name__)
        return GenerationRequest(
            prompt_ids=tuple(prompt_ids),
            params=params or SamplingParams(),
            drafter=self.factory(drafter),
            reuse=reuse,
            owner=owner,
            budget=budget,
            with_cycles=with_cycles,
            prediction=tuple(self.predicted_ids(prediction) if isinstance(prediction, str) else prediction or ()),
            structure=None if params is None else self.compile_structure(params),
        )

    def compile_structure(self, params: SamplingParams) -> Structure | None:
        """What the output must match. Compiled once: later requests with the same one find it."""
        return None if params.structured is None else self._structures.compile(params.structured)

    def predicted_ids(self, prediction: str | None) -> list[int]:
        """Token ids of a predicted output."""
        return self.tokenizer.encode(prediction, add_special=False) if prediction else []

    def _run(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        results: dict[int, _Collected] = {}
        try:
            for prompt_index, request in enumerate(requests):
                for index, request_id in enumerate(self._engine.submit(request)):
                    results[request_id] = _Collected(request.params, prompt_index, index)
            for event in self._engine.events(list(results)):
                results[event.request_id].add(event)
        finally:
            for request_id in results:  # after an error or Ctrl-C nothing may go on running
                self._engine.cancel(request_id)
            for factory in {request.drafter for request in requests}:
                self.keep_memory(factory)
        return [collected.completion() for collected in results.values()]

    def _stream(self, request: GenerationRequest) -> Generator[TokenEvent, None, None]:
        if request.params.n != 1:
            raise OptionError(
                "A stream carries one sample", got=f"n={request.params.n}", next_step="Use generate for several."
            )
        self._engine.check(request.prompt_ids)
        return self._events(request)

    def _events(self, request: GenerationRequest) -> Generator[TokenEvent, None, None]:
        """Submits when the first event is read: a stream that is never read costs nothing."""
        (request_id,) = self._engine.submit(request)
        try:
            yield from self._engine.events([request_id])
        finally:
            self._engine.cancel(request_id)
            self.keep_memory(request.drafter)

    def keep_memory(self, factory: DrafterFactory) -> None:
        """Saves a drafter's memory at intervals, and not while another thread's request writes to it."""
        with self._engine.at_rest():
            factory.memory.save(at_once=False)

    def factory(self, drafter: DrafterLike | None = None) -> DrafterFactory:
        """The factory of the default drafter, or of another one with its default options."""
        if drafter is None:
            return self._default
        with self._loading:  # a thread that loads one keeps no other from running
            if drafter not in self._factories:
                self._factories[drafter] = make_factory(drafter, None, self._engine.target, self._scope, self.tokenizer)
            return self._factories[drafter]

    def _encode(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return _token_ids(prompt)
        if not prompt:
            raise PromptError("The prompt is empty", next_step="Give at least one character of text.")
        return self.tokenizer.encode(prompt)


class _Collected:
    """The events of one sample, joined. Their trees are dropped: a completion does not show them."""

    def __init__(self, params: SamplingParams, prompt_index: int, index: int) -> None:
        self._params, self._prompt_index, self._index = params, prompt_index, index
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._sources: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish_reason = "cancelled"
        self._stats = RequestStats()

    def add(self, event: TokenEvent) -> None:
        self._texts.extend(event.texts)
        self._token_ids.extend(event.token_ids)
        self._sources.extend(event.sources)
        self._logprobs.extend(event.logprobs)
        self._finish_reason = event.finish_reason or self._finish_reason
        self._stats = event.stats

    def completion(self) -> Completion:
        return Completion(
            prompt_index=self._prompt_index,
            index=self._index,
            text="".join(self._texts),
            token_ids=self._token_ids,
            texts=self._texts,
            sources=self._sources,
            finish_reason=self._finish_reason,
            stats=self._stats,
            logprobs=None if self._params.logprobs is None else self._logprobs,
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several; a sequence of numbers is one prompt of token ids."""
    if isinstance(prompts, str) or (_is_row(prompts) and len(prompts) > 0 and _is_whole(prompts[0])):
        return [prompts]  # type: ignore[list-item]
    if not _is_row(prompts):
        raise PromptError(
            "A prompt must be text or token ids",
            got=type(prompts).__name__,
            allowed="a text, token ids, or a list of either",
        )
    return list(prompts)  # type: ignore[arg-type]


def _conversations(messages: Sequence[Any]) -> Sequence[Sequence[Message]]:
    """One conversation or several: lists of messages, which are mappings."""
    is_several = isinstance(messages, list | tuple) and bool(messages) and isinstance(messages[0], list | tuple)
    return messages if is_several else [messages]


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """Whole numbers of any kind: Python's, numpy's or torch's."""
    if _is_row(prompt) and all(_is_whole(token_id) for token_id in prompt):
        return [operator.index(token_id) for token_id in prompt]
    raise PromptError(
        "A prompt must be text or token ids", got=ascii(prompt)[:80], allowed="a text, or whole numbers as token ids"
    )


def _is_row(value: object) -> bool:
    """Lists, tuples, arrays, tensors; not bytes, which would pass for numbers."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, (str, bytes, Mapping))


def _is_whole(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)
