"""Batches draft only where that is quicker, by a clock of the test."""

from __future__ import annotations

import pytest

from draftwood.engine.worth import FIRST_STAY, MAX_STAY, MIN_REQUESTS, TAKEN_OVER_STAY, TRIAL, UNCOUNTED, Worth


class Batch:
    """Emits tokens by a clock of its own: ``seconds`` per pass and tokens per pass, with drafts and without."""

    def __init__(self, requests: int = 32) -> None:
        self.now, self.tokens, self.requests = 0.0, 0, requests
        self.worth = Worth(lambda: self.now)

    def run(self, num_passes: int, with_drafts: tuple[float, int], without: tuple[float, int]) -> list[bool]:
        ways = []
        for _ in range(num_passes):
            ways.append(self.worth.of_drafts(self.requests))
            seconds, tokens = with_drafts if ways[-1] else without
            self.now += seconds
            self.tokens += tokens
            self.worth.note(self.requests, tokens, counts=True)
        return ways


@pytest.mark.parametrize(("rate", "drafts"), [(2.0, True), (1.1, True), (0.9, False), (0.2, False)])
def test_the_quicker_way_stays(rate: float, drafts: bool) -> None:
    batch = Batch()
    ways = batch.run(4000, (2.0, round(200 * rate)), (1.0, 100))
    assert ways.count(drafts) > 0.97 * len(ways)
    assert ways.count(not drafts) > 0  # the other way is tried again
    best = max(rate, 1.0) * 100.0
    assert batch.tokens / batch.now > 0.95 * best


def test_a_change_is_noticed() -> None:
    batch = Batch()
    batch.run(2000, (2.0, 100), (1.0, 100))
    later = batch.run(2 * MAX_STAY, (2.0, 400), (1.0, 100))
    assert all(later[-FIRST_STAY // 2 :])


def test_few_requests_always_draft() -> None:
    assert all(Batch(MIN_REQUESTS - 1).run(1000, (9.0, 1), (1.0, 100)))


def test_other_sizes_begin_with_the_way_of_the_nearest() -> None:
    batch = Batch(64)
    batch.run(100, (2.0, 100), (1.0, 100))  # drafts are slower
    batch.requests = 8
    assert not any(batch.run(TAKEN_OVER_STAY, (1.0, 50), (1.0, 10)))
    later = batch.run(TAKEN_OVER_STAY, (1.0, 50), (1.0, 10))  # here they are quicker
    assert all(later)
    batch.requests = 64
    assert not any(batch.run(100, (2.0, 100), (1.0, 100)))


def test_a_clear_trial_is_short() -> None:
    batch = Batch()
    ways = batch.run(400, (2.0, 100), (1.0, 100))
    assert ways.count(True) <= TRIAL[True] + UNCOUNTED
    again = batch.run(2 * FIRST_STAY, (2.0, 100), (1.0, 100))
    assert 0 < again.count(True) < TRIAL[True] // 2 + UNCOUNTED


def test_single_slow_passes_decide_nothing() -> None:
    """Such as the first one of a size, which compiles kernels."""
    batch = Batch()
    for number in range(400):
        batch.run(1, (100.0 if number < 3 or number % 12 == 5 else 1.0, 150), (1.0, 100))
    ways = batch.run(200, (1.0, 150), (1.0, 100))
    assert ways.count(True) > 0.9 * len(ways)


def test_passes_that_do_not_count_and_idle_time_change_nothing() -> None:
    batch = Batch()
    for _ in range(500):
        batch.now += 100.0
        batch.worth.note(batch.requests, 0, counts=False)
        assert batch.worth.of_drafts(batch.requests)
        batch.worth.rest()
        batch.worth.note(batch.requests, 1, counts=True)


@pytest.mark.parametrize("num_read", [20, 400])
def test_what_drafts_cost_prompts_counts(num_read: int) -> None:
    """Drafts are quicker, but prompts are read more slowly with them, every fourth pass."""
    batch = Batch()
    for _ in range(2000):
        batch.run(3, (1.0, 150), (1.0, 100))
        reading = 0.01 if batch.worth.of_drafts(batch.requests) else 0.001
        batch.now += 1.0 + reading * num_read
        batch.worth.note(batch.requests, 100, num_read, counts=True)
    ways = batch.run(200, (1.0, 150), (1.0, 100))
    assert ways.count(num_read < 100) > 0.9 * len(ways)
