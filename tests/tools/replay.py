"""Shared by tests of recording and replaying."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from draftwood import LLM, SamplingParams
from draftwood.bench.records.methods import BenchMethod, parse_methods
from draftwood.bench.replay import RecordedRequest, Recording, ReplayResult, record, replay
from draftwood.bench.replay.rows import ON_TEXT, RowStore
from draftwood.bench.tasks.load import Task, TaskPrompt
from draftwood.drafters import Drafter
from draftwood.engine import RequestStats
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import ByteTokenizer

TEXTS = ("hello hello hello", "the cat sat on the mat, the cat sat", "xyz" * 20)
GREEDY = SamplingParams(max_tokens=32, seed=0)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=3, n=3)


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return tiny_target(cache_tokens=4096)


@pytest.fixture(scope="module")
def goose(target: NativeTarget) -> Recording:
    return recorded(target, [method_of("goose")])


def make_task(*texts: str, turns: int = 1) -> Task:
    prompts = [TaskPrompt(id=str(n), turns=(text,) * turns, category=None) for n, text in enumerate(texts)]
    return Task(name="letters", prompts=prompts, source="here", sha256="")


def method_of(text: str, budget: int | str = 24, memory: str = "prompt") -> BenchMethod:
    return parse_methods([text], memory, [budget])[0]


def recorded(
    target: NativeTarget,
    methods: Sequence[BenchMethod],
    params: SamplingParams = GREEDY,
    texts: Sequence[str] = TEXTS,
    batch: int = 1,
    **options: int,
) -> Recording:
    recording = Recording(target=target.info)
    record(target, ByteTokenizer(), methods, [make_task(*texts, **options)], params, recording, batch=batch)
    return recording


def run_without_recording(target: NativeTarget, method: BenchMethod, params: SamplingParams) -> list[RequestStats]:
    """Run each prompt alone, without recording."""
    with LLM.from_target(
        target,
        ByteTokenizer(),
        drafter=method.drafter,
        drafter_options=method.options,
        memory=method.memory,
        budget=method.budget,
        max_batch=1,
    ) as llm:
        prompts = [llm.tokenizer.apply_chat([{"role": "user", "content": text}]) for text in TEXTS]
        return [completion.stats for prompt in prompts for completion in llm.generate([prompt], params)]


def counts(stats: RequestStats) -> dict[str, Any]:
    """What a replay must reproduce. Expected chances come from recorded rows: equal but for rounding, so only the nodes
    of each bin are compared."""
    counted = {
        name: value
        for name, value in stats.as_dict().items()
        if name not in ("seconds", "tokens_per_second", "reused_tokens", "calibration")
    }
    return {**counted, "bins": [(own.tried, own.accepted) for own in stats.calibration.bins]}


def replay_with(recording: Recording, drafter: type[Drafter], budget: int) -> list[ReplayResult]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwood.drafters.registry.drafter_class", lambda name: drafter)
        return replay(recording, BenchMethod(label=drafter.name, drafter=drafter.name, memory="prompt", budget=budget))


def hand_made_recording(width: int = 4, vocab_size: int = 258) -> Recording:
    """The text 1 2 | 3 4 5 with known rows, and the branches 2-9, 2-9-8 and 3-7."""
    book = RowStore(width)
    ids = np.arange(6 * width, dtype=np.int32).reshape(6, width)
    places_of = [(ON_TEXT, 1), (ON_TEXT, 2), (ON_TEXT, 3), (-2 - 0, 9), (-2 - 3, 8), (-2 - 1, 7)]
    book.add(places_of, ids, np.log(np.full((6, width), 0.1, np.float32)))
    request = RecordedRequest(
        task="t",
        prompt="p",
        prompt_ids=(1, 2),
        output_ids=(3, 4, 5),
        params=SamplingParams(max_tokens=3),
        finish_reason="length",
        rows=book,
    )
    info = tiny_target().info
    return Recording(target=info, width=width, requests=[request])
