"""The watch: drafts that do not pay in fact are given up, whatever they promise, and tried again seldom."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from draftwood import SamplingParams
from draftwood.drafters import Drafter, DraftRequest, VerifiedTree
from draftwood.sizing.costs import CostProfile
from draftwood.sizing.live import LiveCosts
from draftwood.sizing.watch import MAX_LOSS, MAX_PAUSE, MAX_SCALE, USUAL_COST, Watch, WatchRecord
from draftwood.tree import DraftTree
from tests.tools.engine import PROMPTS, make_llm


def run(watch: Watch, num_cycles: int, cost: float, gained: Callable[[int], int]) -> list[bool]:
    """For every cycle, whether it drafted; ``gained``: tokens of the n-th cycle, if it drafts."""
    drafted = []
    for number in range(num_cycles):
        drafted.append(not watch.is_pausing)
        watch.note(gained(number) if drafted[-1] else 0, cost if drafted[-1] else None)
    return drafted


@pytest.mark.parametrize("cost", [0.02, 0.3, 2.0])
def test_broken_promises_cost_little(cost: float) -> None:
    """Drafts promise to pay and never gain anything."""
    drafted = run(Watch(WatchRecord()), 4000, cost, lambda _: 0)
    lost = cost * drafted.count(True)
    assert lost < 0.02 * 4000 * max(1.0, cost)
    longest = MAX_PAUSE * min(max(cost / USUAL_COST, 1.0), MAX_SCALE)
    assert True in drafted[-2 * int(longest + MAX_LOSS / cost) :]  # but it tries again


def test_costly_drafts_may_fail_now_and_then() -> None:
    """Half of the cycles gain nothing, as with a draft model; in the mean drafts gain twice what they cost."""
    rng = random.Random(1)
    drafted = run(Watch(WatchRecord()), 4000, 1.2, lambda _: rng.choice((0, 0, 0, 4, 5, 6)))
    assert drafted.count(True) > 0.9 * len(drafted)


@pytest.mark.parametrize("chance", [0.2, 0.3, 0.36])
def test_drafts_that_nearly_pay_cost_little(chance: float) -> None:
    """Lucky cycles do not count as success: drafts cost 0.4 tokens and gain one by chance."""
    rng, gains = random.Random(1), list[int]()
    drafted = run(Watch(WatchRecord()), 4000, 0.4, lambda _: gains.append(int(rng.random() < chance)) or gains[-1])
    assert sum(gains) - 0.4 * drafted.count(True) > -0.045 * len(drafted)


def test_gains_are_weighed_against_costs() -> None:
    every_third = [run(Watch(WatchRecord()), 3000, cost, lambda number: number % 3 == 0) for cost in (0.2, 0.5)]
    assert every_third[0].count(True) == 3000
    assert every_third[1].count(True) < 1000


def test_a_drafter_may_learn_first() -> None:
    """Nothing is gained for ten cycles, at a cost of 5%."""
    assert all(run(Watch(WatchRecord()), 100, 0.05, lambda number: number > 10))


def test_resumes_when_drafts_pay_again() -> None:
    watch = Watch(WatchRecord())
    run(watch, 2000, 0.5, lambda _: 0)
    later = run(watch, 4 * MAX_PAUSE, 0.5, lambda _: 2)
    assert all(later[MAX_PAUSE:])


def test_success_is_forgotten() -> None:
    """A long success does not pay for as long a failure."""
    watch = Watch(WatchRecord())
    run(watch, 1000, 0.1, lambda _: 3)
    assert run(watch, 40, 0.5, lambda _: 0).count(True) < 16


def test_requests_take_over_balance_and_pause() -> None:
    record, drafted = WatchRecord(), list[bool]()
    for _ in range(100):
        watch = Watch(record)
        watch.begin(pausing=True)
        drafted += run(watch, 5, 0.3, lambda _: 0)
    alone = run(Watch(WatchRecord()), 500, 0.3, lambda _: 0)
    assert drafted == alone
    other = Watch(record)
    other.begin(pausing=False)
    assert not other.is_pausing


def test_a_pause_that_is_ignored_does_not_grow() -> None:
    """A batch that tries whether drafts pay lets all requests draft. Losses then start no further pauses."""
    record, paused = WatchRecord(), list[int]()
    watches = [Watch(record) for _ in range(8)]
    for _ in range(24):
        for watch in watches:
            watch.note(0, 1.0)
            paused.append(watch.pause_left)
    assert max(paused) < MAX_PAUSE
    assert record.pause < MAX_PAUSE
    for _ in range(4):
        watches[0].note(3, 1.0)
    assert not watches[0].is_pausing
    later = Watch(record)
    later.begin(pausing=True)
    assert not later.is_pausing


# -- in the engine ---------------------------------------------------------------------------------------------------


class Overconfident(Drafter):
    """Always offers a wrong token, sure of it: calibrated drafters are believed."""

    name = "overconfident"
    is_calibrated = True
    wants_logits = False

    def begin(self, request: DraftRequest) -> None:
        self._root = request.prompt_ids[-1]

    def propose(self, budget: int) -> DraftTree:
        guesses = [(self._root + 101) % 256] * min(budget - 1, 3)
        return DraftTree.chain([self._root, *guesses], "sure", [1.0, *[0.999] * len(guesses)])

    def observe(self, verified: VerifiedTree) -> None:
        self._root = verified.emitted[-1]


def test_engine_gives_up_drafts_that_lose_time() -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    with make_llm(drafter=Overconfident, budget="auto", max_batch=1) as llm:
        llm.engine._costs = LiveCosts(CostProfile((1, 8), (16,), ((1.0, 1.7),)))  # hours, for this machine's clock
        sizes = [len(event.tree) for event in llm.stream(PROMPTS[0], params)]
    assert max(sizes[:4]) == 4  # it is believed at first
    assert sum(size > 1 for size in sizes[200:]) < 20
