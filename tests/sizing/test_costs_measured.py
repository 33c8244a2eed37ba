"""Measuring the cost of passes: rotation, noise, contexts, and limits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.sizing import costs
from draftwood.sizing.costs import LARGEST_TREE, SIZES, load_profile, measure_costs, profile_path, require_measured
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from draftwood.text.bytes import ByteTokenizer

PASS_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    """An empty cache for every test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "cache_home", lambda: tmp_path)
        patch.setattr(costs, "WARM_UP_SECONDS", 0.0)
        yield tmp_path


def test_what_is_measured_is_not_measured_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    require_measured(target)
    measured = load_profile(target.info)
    assert measured is not None

    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(costs, "measure_costs", never)
    require_measured(target)
    assert load_profile(target.info) == measured


OLD = {"format": "draftwood-costs", "version": 1, "sizes": [1, 2], "contexts": [16], "seconds": [[1.0, 2.0]]}


@pytest.mark.parametrize("content", ["{}", '{"format": "draftwood-costs", "version": 2}', "damaged", json.dumps(OLD)])
def test_unusable_file_is_measured_again_and_replaced(content: str) -> None:
    target = tiny_target()
    path = profile_path(target.info)
    path.parent.mkdir()
    path.write_text(content, encoding="utf-8")
    require_measured(target)
    assert load_profile(target.info) is not None


def test_a_cache_that_cannot_be_written_does_not_fail_a_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = cache / "file"
    blocked.write_text("no folder", encoding="utf-8")
    monkeypatch.setattr(costs, "cache_home", lambda: blocked)
    require_measured(tiny_target())
    with LLM.from_target(tiny_target(), ByteTokenizer(), drafter="pld", budget="auto") as llm:
        assert len(llm.generate("abab", SamplingParams(max_tokens=40, ignore_eos=True))[0].token_ids) == 40


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_measured_costs_ascend_and_sequences_are_closed(backend: str) -> None:
    target = tiny_target(backend=backend)
    profile = measure_costs(target, (16, 64, 200))
    assert profile is not None
    assert profile.contexts == (16, 64, 200)
    assert profile.sizes == SIZES[: len(profile.sizes)]
    for row in profile.seconds:
        assert list(row) == sorted(row)
        assert len(row) == len(profile.sizes)
        assert row[0] > 0.0
    for shorter, longer in zip(profile.seconds, profile.seconds[1:], strict=False):
        assert all(a <= b for a, b in zip(shorter, longer, strict=True))
    assert target.can_open(target.num_slots)


class FakeClock:
    """Passes take ``seconds`` of their context and size."""

    def __init__(self, target: NativeTarget, seconds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(costs, "time_pass", lambda _, sequence, size: seconds(target.length(sequence), size))


def test_costs_are_measured_after_the_stated_context(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    FakeClock(target, lambda context, size: 1.0 + 0.001 * context * size, monkeypatch)
    profile = measure_costs(target, (10, 300))
    assert profile is not None
    for context, row in zip(profile.contexts, profile.seconds, strict=True):
        assert row == pytest.approx([1.0 + 0.001 * context * size for size in profile.sizes])
    assert profile.of(20, 1000) == pytest.approx([1.0 + size for size in range(1, 21)])


def test_measurement_stops_at_too_expensive_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    FakeClock(target, lambda context, size: float(size if context < 100 else size**1.5), monkeypatch)
    profile = measure_costs(target, (16, 200))
    assert profile is not None
    assert profile.sizes == (1, 2, 3, 4, 6)  # 6 ** 1.5 is the first above 8 at the longer context
    assert [len(row) for row in profile.seconds] == [5, 5]


def test_dips_are_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    FakeClock(target, lambda context, size: 1.0 if size == 4 and context < 100 else 2.0, monkeypatch)
    profile = measure_costs(target, (16, 200))
    assert profile is not None
    assert set(profile.seconds[0]) == set(profile.seconds[1]) == {2.0}


def test_faster_longer_context_is_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    FakeClock(target, lambda context, size: 2.0 if context < 100 else 1.0, monkeypatch)
    profile = measure_costs(target, (16, 200))
    assert profile is not None
    assert profile.seconds[0] == profile.seconds[1]


def stepping_target(**options: Any) -> NativeTarget:
    """A target with fixed pass sizes."""
    target = tiny_target(replace(TINY_CONFIG, context_length=4096), **options)
    target.info = replace(target.info, pass_sizes=PASS_SIZES)
    return target


def next_size(size: int) -> int:
    return min(pass_size for pass_size in PASS_SIZES if pass_size >= size)


def test_passes_of_a_target_with_sizes_are_timed_for_batches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    target = stepping_target()
    asked: list[int] = []

    def seconds(context: int, size: int) -> float:
        asked.append(size)
        return 1.0 + 0.002 * size + 0.0001 * context

    FakeClock(target, seconds, monkeypatch)
    profile = measure_costs(target)
    assert profile is not None
    assert profile.stepped
    assert profile.sizes == PASS_SIZES[:-1]  # up to 512
    assert set(asked) == set(profile.sizes)
    assert profile.largest == LARGEST_TREE
    for context in (16, 512, 3000):
        line = profile.of(512, context)
        truth = [1.0 + 0.002 * next_size(size) + 0.0001 * context for size in range(1, 513)]
        assert line == pytest.approx(truth)


def test_gpu_is_measured_after_a_longer_context(monkeypatch: pytest.MonkeyPatch) -> None:
    for cache_tokens, contexts in [(8192, (16, 2048)), (1500, (16, 1500 - 512)), (520, (16, 520 - 256))]:
        target = stepping_target(cache_tokens=cache_tokens)
        FakeClock(target, lambda context, size: 1.0, monkeypatch)
        target.info = replace(target.info, device=torch.device("cuda"))
        profile = measure_costs(target)
        assert profile is not None
        assert profile.contexts == contexts


def test_preparation_in_first_pass_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass of a size may compile and capture; this neither counts as its cost nor stops the measurement."""
    target = stepping_target()
    seen: set[int] = {1}

    def seconds(context: int, size: int) -> float:
        first = size not in seen
        seen.add(size)
        return 50.0 if first else 1.0

    FakeClock(target, seconds, monkeypatch)
    profile = measure_costs(target)
    assert profile is not None
    assert profile.sizes == PASS_SIZES[:-1]
    assert {seconds for row in profile.seconds for seconds in row} == {1.0}


def record_timed_sizes(target: NativeTarget, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of timed passes; every pass takes a second."""
    asked: list[int] = []

    def seconds(context: int, size: int) -> float:
        asked.append(size)
        return 1.0

    FakeClock(target, seconds, monkeypatch)
    return asked


def test_sizes_are_measured_in_rotation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A temporary disturbance affects several sizes, not all readings of one."""
    target = stepping_target()
    asked = record_timed_sizes(target, monkeypatch)
    assert measure_costs(target, (16,)) is not None
    timed = list(PASS_SIZES[:-1])
    assert asked == timed * (len(asked) // len(timed))
    assert costs.MIN_ROUNDS <= len(asked) // len(timed) <= costs.MAX_ROUNDS


def test_rounds_end_after_enough_time(monkeypatch: pytest.MonkeyPatch) -> None:
    target = stepping_target()
    asked = record_timed_sizes(target, monkeypatch)
    monkeypatch.setattr(costs, "ROUNDS_SECONDS", -1.0)
    assert measure_costs(target, (16,)) is not None
    assert len(asked) == costs.MIN_ROUNDS * len(PASS_SIZES[:-1])


CHANCES = {  # of the 1st, 2nd, ... node, best first
    "sure": [0.98**node for node in range(LARGEST_TREE)],
    "mixed": [1.0, *(0.75 / node**1.15 for node in range(1, LARGEST_TREE))],
    "doubtful": [1.0, *(0.3 / node**1.5 for node in range(1, LARGEST_TREE))],
}
CURVES = {  # time of a pass relative to a single position: large GPU, small GPU, GPU with steps
    "flat": ([1, 64, 128, 512], [1.0, 1.15, 1.35, 3.2]),
    "rising": ([1, 16, 64, 512], [1.0, 1.2, 2.2, 14.0]),
    "stairs": ([1, 32, 48, 64, 512], [1.0, 1.02, 1.6, 1.62, 4.0]),
}


@pytest.mark.parametrize("chances", CHANCES)
@pytest.mark.parametrize("curve", CURVES)
def test_noise_hardly_changes_the_best_size(chances: str, curve: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reading is a few per cent off, many are far too slow, and no size is timed more than three times."""
    noise = np.random.default_rng(0)

    def truth(size: int) -> float:
        return float(np.interp(next_size(size), *CURVES[curve]))

    def reading(context: int, size: int) -> float:
        slow = noise.uniform(0.2, 2.0) if noise.random() < 0.3 else 0.0
        return truth(size) * (1.0 + noise.exponential(0.01) + slow)

    target = stepping_target()
    FakeClock(target, reading, monkeypatch)
    monkeypatch.setattr(costs, "MAX_ROUNDS", costs.MIN_ROUNDS)
    for _ in range(30):
        profile = measure_costs(target)
        assert profile is not None
        tokens = np.cumsum(CHANCES[chances])[: profile.largest]
        true_rates = tokens / [truth(size) for size in range(1, profile.largest + 1)]
        chosen = int(np.argmax(tokens / profile.of(profile.largest, 16)))
        assert true_rates[chosen] >= 0.95 * true_rates.max()


def test_progress_is_reported_by_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the bar is half of the work: passes over many positions are most of it."""
    target = tiny_target()
    told: list[tuple[str, int, int]] = []
    spent: list[int] = []

    def seconds(context: int, size: int) -> float:
        spent.append(max(size, 8))
        return 1.0

    FakeClock(target, seconds, monkeypatch)
    monkeypatch.setattr(costs, "ROUNDS_SECONDS", -1.0)
    profile = measure_costs(target, (4, 8), lambda *step: told.append((*step[:1], sum(spent), *step[1:])))
    assert profile is not None
    total = sum(spent)
    assert {step[0] for step in told} == {costs.LABEL}
    assert told[-1][2] == told[-1][3]
    assert all(abs(done / whole - work / total) < 0.1 for _, work, done, whole in told)


def test_failed_pass_closes_its_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()

    def fail(*_: object) -> float:
        raise RuntimeError("no")

    monkeypatch.setattr(costs, "time_pass", fail)
    with pytest.raises(RuntimeError):
        measure_costs(target)
    assert target.can_open(target.num_slots)


@pytest.mark.parametrize("length", [1, 2, 10, 20, 100])
def test_small_contexts_and_caches_limit_what_is_measured(length: int) -> None:
    for target in (tiny_target(replace(TINY_CONFIG, context_length=length)), tiny_target(cache_tokens=length)):
        profile = measure_costs(target)
        assert profile is not None
        assert profile.largest <= max(1, length // 2)
        assert profile.contexts[-1] + profile.largest <= length
        assert target.can_open(length)
