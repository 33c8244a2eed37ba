"""Who answers: one of our drafters, or a peer in a process of its own. To a benchmark they look the same."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from draftwood.bench.records import BenchMethod, measure_peak_memory
from draftwood.config import SamplingParams
from draftwood.llm import LLM, Completion
from draftwood.targets import Loaded


class SampleResult(NamedTuple):
    """One sample, with what a record needs."""

    token_ids: list[int]
    text: str
    finish_reason: str
    prompt_tokens: int
    decode_tokens: int
    decode_seconds: float
    total_seconds: float
    first_token_seconds: float | None
    peak_bytes: int | None
    stats: dict[str, Any] | None


class BenchEngine(Protocol):
    """Answers prompts that run together; the samples of each come in order."""

    def warm_up(self, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        """Answers once without learning anything that a later answer could profit from."""

    def answer(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[SampleResult]]: ...


class DrafterEngine:
    """A drafter of ours on the target that all of them share."""

    def __init__(self, method: BenchMethod, loaded: Loaded, batch: int) -> None:
        self._method, self._loaded, self._batch = method, loaded, batch
        self.llm = self._new_llm(method.memory)

    def warm_up(self, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        """By a twin: neither the memory nor what is known about the sizes of trees is that of the run."""
        with self._new_llm("request") as twin:
            twin.generate(list(prompts), params)

    def answer(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[SampleResult]]:
        with measure_peak_memory(self.llm.info.device) as peak:
            started = time.perf_counter()
            try:
                completions = self.llm.generate(list(prompts), params)
            except BaseException:
                self.llm.close()  # the cache is everyone's: no prefix of ours may stay in it while others answer
                raise
            wall = time.perf_counter() - started
        answers: list[list[SampleResult]] = [[] for _ in prompts]
        for completion in completions:
            answers[completion.prompt_index].append(_answer(completion, peak.num_bytes))
        return answers if self._batch == 1 else _shared(answers, completions, wall)

    def close(self) -> None:
        self.llm.close()

    def _new_llm(self, memory: str) -> LLM:
        return LLM.from_target(
            self._loaded.target,
            self._loaded.codec,
            drafter=self._method.drafter,
            drafter_options=self._method.options,
            memory=memory,
            budget=self._method.budget,
            max_batch=self._batch,
        )


def _shared(
    answers: list[list[SampleResult]], completions: Sequence[Completion], wall: float
) -> list[list[SampleResult]]:
    """Seconds by tokens: what runs together has one speed, that of the batch."""
    decoding = wall - sum(completion.stats.prefill_seconds for completion in completions)
    tokens = sum(completion.stats.output_tokens for completion in completions)

    def share(answer: SampleResult) -> SampleResult:
        part = answer.decode_tokens / max(tokens, 1)
        return answer._replace(decode_seconds=decoding * part, total_seconds=wall * part)

    return [[share(answer) for answer in samples] for samples in answers]


def _answer(completion: Completion, peak_bytes: int | None) -> SampleResult:
    stats = completion.stats
    return SampleResult(
        token_ids=completion.token_ids,
        text=completion.text,
        finish_reason=completion.finish_reason,
        prompt_tokens=stats.prompt_tokens,
        decode_tokens=stats.output_tokens,
        decode_seconds=stats.total_seconds - stats.prefill_seconds,
        total_seconds=stats.total_seconds,
        first_token_seconds=stats.first_token_seconds,
        peak_bytes=peak_bytes,
        stats=stats.as_dict(),
    )
