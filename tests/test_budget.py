"""The size of a tree follows from what positions cost and what guesses bring."""

from __future__ import annotations

from collections import Counter

import pytest

from draftwood import LLM, SamplingParams
from draftwood.engine.budget import EXPLORE_EVERY, SIZES, CostCurve, expected_tokens, measure_costs
from draftwood.engine.stats import RequestStats
from draftwood.target.tiny import ByteTokenizer, tiny_target

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
    assert expected_tokens(stats, 1) == 1.0
    assert expected_tokens(stats, 2) == pytest.approx(1.8, abs=0.01)
    assert expected_tokens(stats, 3) == pytest.approx(2.2, abs=0.01)
    assert expected_tokens(stats, 4) == pytest.approx(2.3, abs=0.01)


def test_free_positions_are_all_used() -> None:
    assert FREE.best_size(RequestStats()) == 60
    assert FREE.best_size(seen([500] * 20, 1000)) == 60


def test_useless_guesses_end_in_plain_decoding_with_a_try_now_and_then() -> None:
    assert STEEP.best_size(seen([10] + [0] * 6, 1000)) == 1
    assert STEEP.best_size(seen([10] + [0] * 6, 1000, cycles=EXPLORE_EVERY - 1)) == 2


def test_good_guesses_pay_for_positions() -> None:
    assert STEEP.best_size(seen([1000] * 7, 1000)) == 8
    assert STEEP.best_size(seen([950, 900, 850, 100, 90, 80, 70], 1000)) == 4


def test_measured_costs_start_at_one_and_never_fall() -> None:
    target = tiny_target()
    curve = measure_costs(target)
    assert curve.costs[0] == 1.0
    assert list(curve.costs) == sorted(curve.costs)
    assert curve.sizes == SIZES[: len(curve.costs)]
    assert target.can_open(target.num_slots)


def test_a_cache_too_small_to_measure_decodes_plainly() -> None:
    llm = LLM.from_target(tiny_target(cache_tokens=40), ByteTokenizer(), drafter="pld")
    assert llm.budget == 1
    assert llm.generate("abab", SamplingParams(max_tokens=8, ignore_eos=True))[0].stats.cycles == 8
