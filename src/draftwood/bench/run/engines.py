"""The engine interface of a benchmark, and its implementation for Draftwood's drafters."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from draftwood.bench.records import BenchMethod, measure_peak_memory
from draftwood.config import SamplingParams
from draftwood.llm import LLM, Completion
from draftwood.targets import Loaded


class SampleResult(NamedTuple):
    """One generated sample with its measurements."""

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
    """Generates for a batch of prompts; the samples of each prompt are in order."""

    def warm_up(self, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        """Generate once, without learning anything that later requests could use."""

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[SampleResult]]: ...


class DrafterEngine:
    """A Draftwood drafter on the target shared by all drafters."""

    def __init__(self, method: BenchMethod, loaded: Loaded, batch: int) -> None:
        self._method, self._loaded, self._batch = method, loaded, batch
        self.llm = self._new_llm(method.memory)

    def warm_up(self, prompts: Sequence[list[int]], params: SamplingParams) -> None:
        """Use a separate LLM, so that the run's memory and tree-size estimates stay untouched."""
        with self._new_llm("request") as llm:
            llm.generate(list(prompts), params)

    def generate(self, prompts: Sequence[list[int]], params: SamplingParams) -> list[list[SampleResult]]:
        with measure_peak_memory(self.llm.info.device) as peak:
            started = time.perf_counter()
            try:
                completions = self.llm.generate(list(prompts), params)
            except BaseException:
                self.llm.close()  # the cache is shared: leave no prefix in it for other methods
                raise
            wall = time.perf_counter() - started
        results: list[list[SampleResult]] = [[] for _ in prompts]
        for completion in completions:
            results[completion.prompt_index].append(_to_sample(completion, peak.num_bytes))
        return results if self._batch == 1 else _share_time(results, completions, wall)

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


def _share_time(
    results: list[list[SampleResult]], completions: Sequence[Completion], wall: float
) -> list[list[SampleResult]]:
    """Split the batch's time by tokens, so that every request has the speed of the batch."""
    decoding = wall - sum(completion.stats.prefill_seconds for completion in completions)
    tokens = sum(completion.stats.output_tokens for completion in completions)

    def share(sample: SampleResult) -> SampleResult:
        part = sample.decode_tokens / max(tokens, 1)
        return sample._replace(decode_seconds=decoding * part, total_seconds=wall * part)

    return [[share(sample) for sample in samples] for samples in results]


def _to_sample(completion: Completion, peak_bytes: int | None) -> SampleResult:
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
