"""The size of a tree follows from what positions cost and what guesses bring."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftwood import LLM, SamplingParams
from draftwood.engine.budget import SIZES, CostCurve, GuessRecord, measure_costs
from draftwood.target.tiny import TINY_CONFIG, ByteTokenizer, tiny_target
from draftwood.tree import DraftTree

FREE = CostCurve(SIZES, (1.0,) * len(SIZES))
STEEP = CostCurve((1, 2, 4, 8), (1.0, 1.6, 2.4, 4.0))
CHAIN = DraftTree.chain(list(range(8)), "test")


def seen(accepted: list[int], offered: DraftTree = CHAIN) -> GuessRecord:
    """A request that verified the whole chain every time and accepted so many of its nodes."""
    record = GuessRecord()
    for count in accepted:
        record.note(offered, offered, range(count + 1), first_token=1 if count else 99)
    return record


def test_expected_tokens_follow_the_counts() -> None:
    always = seen([7] * 500)
    assert always.expected_tokens(8) == pytest.approx(list(range(1, 9)), abs=0.2)
    three = seen([3] * 500)
    assert three.expected_tokens(8) == pytest.approx([1, 2, 3, 4, 4, 4, 4, 4], abs=0.1)
    assert seen([0] * 500).expected_tokens(60) == pytest.approx([1.0] * 60, abs=0.02)
    assert len(GuessRecord().expected_tokens(60)) == 60


def test_right_guesses_come_in_runs() -> None:
    runs = seen(([7] * 20 + [0] * 20) * 5)
    assert STEEP.best_size(runs) == 1  # it ended in a run of wrong ones
    runs.note(CHAIN, CHAIN.first(1), [0], first_token=1)  # a guess that was not verified would have been right
    assert STEEP.best_size(runs) > 1


def test_free_positions_are_used_as_far_as_guesses_reach() -> None:
    assert FREE.best_size(seen([7] * 100)) >= 8


def test_good_guesses_pay_for_positions_and_bad_ones_do_not() -> None:
    assert STEEP.best_size(seen([7] * 100)) == 8
    assert STEEP.best_size(seen([3] * 100)) == 4
    assert STEEP.best_size(seen([0] * 100)) == 1


def test_cycles_without_a_guess_say_nothing() -> None:
    record = GuessRecord()
    before = record.expected_tokens(8)
    record.note(CHAIN.first(1), CHAIN.first(1), [0], first_token=5)
    assert record.expected_tokens(8) == before


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
