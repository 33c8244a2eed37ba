"""The front door: a model, a drafter, and text.

llm = LLM("smollm2", drafter="goose")
print(llm.generate("Write a haiku about trees.")[0].text)
"""

from __future__ import annotations

import operator
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftwood.config import (
    DEFAULT_DRAFTER,
    DEFAULT_MEMORY,
    DEFAULT_MODEL,
    PREFILL_CHUNK,
    EngineOptions,
    SamplingParams,
)
from draftwood.drafters import Drafter, DrafterFactory, check_drafter, make_factory, parse_memory
from draftwood.engine import Engine, RequestStats, TokenEvent, TokenLogprobs
from draftwood.errors import OptionError, PromptError
from draftwood.progress import Progress
from draftwood.targets import Target, TargetInfo, load_target
from draftwood.text import TextCodec

Prompt = str | Sequence[int]  # text, or token ids
Message = Mapping[str, str]  # {"role": ..., "content": ...}
DrafterLike = str | type[Drafter]  # a registered name, or a class of one's own


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One finished sample."""

    prompt_index: int  # which of the prompts
    index: int  # which of its ``n`` samples
    text: str
    token_ids: list[int]
    texts: list[str]  # the text each token made certain; joined they are ``text``
    sources: list[str]  # who drafted each token; "target" where the target added it itself
    finish_reason: str  # "stop", "length" or "cancelled"
    stats: RequestStats
    logprobs: list[TokenLogprobs] | None  # one a token, if they were asked for


class LLM:
    """A loaded model that generates. Holds the target's cache; ``close`` or a ``with`` block gives it back."""

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        drafter: DrafterLike = DEFAULT_DRAFTER,
        drafter_options: Mapping[str, Any] | None = None,
        memory: str | Path = DEFAULT_MEMORY,
        budget: int | str = "auto",
        dtype: str = "auto",
        quantize: str | None = None,
        device: str = "auto",
        target: str = "auto",
        max_batch: int = 8,
        cache_tokens: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        """``memory``: who shares what drafters learn: "request", "prompt", "process", or a file to keep it in.

        ``quantize``: "fp8" or "int8" hold the weights in 8 bits, on a GPU. That is half the memory, and another model:
        ``LLM("smollm2", quantize="fp8")``.
        """
        options = EngineOptions(budget=budget, max_batch=max_batch, cache_tokens=cache_tokens)
        check_drafter(drafter, drafter_options)  # a slip of the pen should not wait for a model to load
        parse_memory(memory)
        loaded = load_target(
            model,
            dtype=dtype,
            quantize=quantize,
            device=device,
            target=target,
            max_batch=max_batch,
            cache_tokens=cache_tokens,
            progress=progress,
        )
        self._setup(loaded.target, loaded.codec, drafter, drafter_options, memory, options, progress)

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
    ) -> LLM:
        """Around a target that is loaded already."""
        llm = cls.__new__(cls)
        options = EngineOptions(budget=budget, max_batch=max_batch, prefill_chunk=prefill_chunk)
        llm._setup(target, codec, drafter, drafter_options, memory, options)
        return llm

    def _setup(
        self,
        target: Target,
        codec: TextCodec,
        drafter: DrafterLike,
        drafter_options: Mapping[str, Any] | None,
        memory: str | Path,
        options: EngineOptions,
        progress: Progress | None = None,
    ) -> None:
        self.tokenizer = codec
        self._scope = parse_memory(memory).scope  # a file belongs to one drafter, its scope to all
        self._engine = Engine(target, codec, options, progress)
        self._default = make_factory(drafter, drafter_options, target, memory, codec)
        self._factories: dict[DrafterLike, DrafterFactory] = {drafter: self._default}

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends what still runs, frees the cache's slots, and writes the drafter's memory to its file, if it has one."""
        self._engine.clear()
        with self._engine.at_rest():
            self._default.memory.save()

    @property
    def info(self) -> TargetInfo:
        """What is known about the loaded model."""
        return self._engine.target.info

    @property
    def engine(self) -> Engine:
        """What runs the requests, for those who submit and collect themselves."""
        return self._engine

    @property
    def drafter(self) -> str:
        """The name of the drafter that runs where none is named."""
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

        ``drafter`` is another drafter for this call, with its default options where it is not the one of this LLM.
        ``prediction`` is the output that you expect, such as a text of which little is to be changed: drafters that
        copy text find it there. It changes nothing but the speed.
        """
        own = [self._encode(prompt) for prompt in _listed(prompts)]
        return self._run(own, params, drafter, prediction, reuse=False)

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        drafter: DrafterLike | None = None,
        prediction: str | None = None,
    ) -> list[Completion]:
        """Answers a conversation through the model's chat template. The cache of earlier turns is used again."""
        return self._run([self.tokenizer.apply_chat(messages)], params, drafter, prediction, reuse=True)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        drafter: DrafterLike | None = None,
        prediction: str | None = None,
    ) -> Generator[TokenEvent, None, None]:
        """Token events of one completion as blocks are accepted. Leaving the loop early cancels the request."""
        return self._events(self._encode(prompt), params, drafter, prediction, reuse=False)

    def stream_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        drafter: DrafterLike | None = None,
        prediction: str | None = None,
    ) -> Generator[TokenEvent, None, None]:
        """As ``stream``, for a conversation."""
        return self._events(self.tokenizer.apply_chat(messages), params, drafter, prediction, reuse=True)

    def predicted_ids(self, prediction: str | None) -> list[int]:
        """Of the text that somebody expects, as the model would write it."""
        return self.tokenizer.encode(prediction, add_special=False) if prediction else []

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | None,
        drafter: DrafterLike | None,
        prediction: str | None,
        *,
        reuse: bool,
    ) -> list[Completion]:
        params = _checked(params)
        factory, expected = self.factory(drafter), self.predicted_ids(prediction)
        results: dict[int, _Collected] = {}
        try:
            for prompt_index, prompt_ids in enumerate(prompts):
                own = self._engine.submit(prompt_ids, params, factory, reuse=reuse, prediction=expected)
                for index, request_id in enumerate(own):
                    results[request_id] = _Collected(prompt_index, index)
            for event in self._engine.events(list(results)):
                results[event.request_id].add(event)
        finally:
            for request_id in results:  # after an error or Ctrl-C nothing may go on running
                self._engine.cancel(request_id)
            self.keep_memory(factory)
        return [collected.completion(params) for collected in results.values()]

    def _events(
        self,
        prompt_ids: list[int],
        params: SamplingParams | None,
        drafter: DrafterLike | None,
        prediction: str | None,
        *,
        reuse: bool,
    ) -> Generator[TokenEvent, None, None]:
        params = _checked(params)
        if params.n != 1:
            raise OptionError("A stream carries one sample", got=f"n={params.n}", next_step="Use generate for several.")
        self._engine.check(prompt_ids)
        return self._started(prompt_ids, params, self.factory(drafter), self.predicted_ids(prediction), reuse=reuse)

    def _started(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        factory: DrafterFactory,
        prediction: list[int],
        *,
        reuse: bool,
    ) -> Generator[TokenEvent, None, None]:
        """Submits when the first event is asked for: a stream that nobody reads costs nothing."""
        (request_id,) = self._engine.submit(prompt_ids, params, factory, reuse=reuse, prediction=prediction)
        try:
            yield from self._engine.events([request_id])
        finally:
            self._engine.cancel(request_id)
            self.keep_memory(factory)

    def keep_memory(self, factory: DrafterFactory) -> None:
        """Saves it now and then; not while another thread's request writes to it."""
        with self._engine.at_rest():
            factory.memory.save(at_once=False)

    def factory(self, drafter: DrafterLike | None = None) -> DrafterFactory:
        """Of drafters with this name, and with its default options where it is not the one of this LLM."""
        if drafter is None:
            return self._default
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
    """The events of one sample, put together. Their trees are let go: nobody reads them from a completion."""

    def __init__(self, prompt_index: int, index: int) -> None:
        self._prompt_index, self._index = prompt_index, index
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

    def completion(self, params: SamplingParams) -> Completion:
        return Completion(
            prompt_index=self._prompt_index,
            index=self._index,
            text="".join(self._texts),
            token_ids=self._token_ids,
            texts=self._texts,
            sources=self._sources,
            finish_reason=self._finish_reason,
            stats=self._stats,
            logprobs=None if params.logprobs is None else self._logprobs,
        )


def _checked(params: SamplingParams | None) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise OptionError("params must be SamplingParams", got=type(params).__name__)
    return params


def _listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several; a row of numbers is one prompt of token ids."""
    if isinstance(prompts, str) or (_is_row(prompts) and len(prompts) > 0 and _is_whole(prompts[0])):
        return [prompts]  # type: ignore[list-item]
    if not _is_row(prompts):
        raise PromptError(
            "This is no prompt", got=type(prompts).__name__, allowed="a text, token ids, or a list of either"
        )
    return list(prompts)  # type: ignore[arg-type]


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """Whole numbers of any kind: Python's, numpy's or torch's."""
    if _is_row(prompt) and all(_is_whole(token_id) for token_id in prompt):
        return [operator.index(token_id) for token_id in prompt]
    raise PromptError("This is no prompt", got=ascii(prompt)[:80], allowed="a text, or whole numbers as token ids")


def _is_row(value: object) -> bool:
    """Lists, tuples, arrays, tensors; not bytes, which would pass for numbers."""
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, (str, bytes, Mapping))


def _is_whole(value: object) -> bool:
    try:
        operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)
