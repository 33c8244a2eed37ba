"""The size of a tree follows from what positions cost and what guesses bring."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from draftwood import LLM, SamplingParams
from draftwood.engine.budget import EXPLORE_EVERY, SIZES, CostCurve, expected_tokens, measure_costs
from draftwood.engine.stats import RequestStats
from draftwood.target.tiny import TINY_CONFIG, ByteTokenizer, tiny_target

FREE = CostCurve(SIZES, (1.0,) * len(SIZES))
STEEP = CostCurve((1, 2, 4, 8), (1.0, 1.6, 2.4, 4.0))


def seen(accepted: list[int], trials: int, cycles: int = 100) -> RequestStats:
    """A request that tried chains of that many guesses and saw so many right at each depth."""
    return RequestStats(
        cycles=cycles,
        tried_by_depth=Counter({depth + 1: trials for depth in range(len(accepted))}),
        accepted_by_depth=Counter({depth + 1: count for depth, count in enumerate(accepted)}),
    )


def test_expected_tokens_follow_the_counts() -> None:
    stats = seen([800, 400, 100], 1000)
    assert expected_tokens(stats, 4) == pytest.approx([1.0, 1.8, 2.2, 2.3], abs=0.01)
    assert expected_tokens(stats, 1) == [1.0]
    hopeless = expected_tokens(seen([0] * 9, 1000), 10)
    assert len(hopeless) == 10
    assert hopeless[-1] < 1.01


def test_free_positions_are_used_as_far_as_guesses_reach() -> None:
    assert FREE.best_size(RequestStats()) >= 12
    assert FREE.best_size(seen([900] * 20, 1000)) >= 24


def test_useless_guesses_end_in_plain_decoding_with_a_try_now_and_then() -> None:
    assert STEEP.best_size(seen([10] + [0] * 6, 1000)) == 1
    assert STEEP.best_size(seen([10] + [0] * 6, 1000, cycles=EXPLORE_EVERY - 1)) == 2


def test_good_guesses_pay_for_positions() -> None:
    assert STEEP.best_size(seen([1000] * 7, 1000)) == 8
    assert STEEP.best_size(seen([950, 900, 850, 100, 90, 80, 70], 1000)) == 4


def test_measured_costs_start_at_one_and_never_fall() -> None:
    target = tiny_target()
    curve = measure_costs(target)
    assert curve is not None
    assert curve.costs[0] == 1.0
    assert list(curve.costs) == sorted(curve.costs)
    assert curve.sizes == SIZES[: len(curve.costs)]
    assert target.can_open(target.num_slots)


def test_a_full_cache_is_measured_later() -> None:
    target = tiny_target(cache_tokens=64)
    llm = LLM.from_target(target, ByteTokenizer(), drafter="pld")
    held = target.open(30)
    assert llm.budget == 1
    assert llm.generate("abab", SamplingParams(max_tokens=8, ignore_eos=True))[0].stats.cycles == 8
    target.close(held)
    assert llm.budget > 1


def test_small_contexts_and_caches_limit_what_is_measured() -> None:
    curve = measure_costs(tiny_target(replace(TINY_CONFIG, context_length=20)))
    assert curve is not None
    assert curve.largest <= 16
    curve = measure_costs(tiny_target(cache_tokens=10))
    assert curve is not None
    assert curve.largest <= 8
