"""A blend that a draft model takes part in: what a pass gained."""

import random

import numpy as np
import pytest

from draftwood.compiled import Hints
from draftwood.growth import Blend, BlendLimits, ExpandingBlend, PassRecord, Trust, new_learned
from draftwood.growth.expanding import COMPUTE_EVERY, CYCLE_DECAY, FADED, PER_CONTEXT, Aftermath, CycleShape
from draftwood.growth.priors import NO_PRIORS
from draftwood.sources import DraftedHints
from tests.growth.test_blend import FixedHints


class AfterRoot(FixedHints):
    """It knows what follows the text, and nothing about what follows that."""

    def look(self, tail: list[int], depth: int) -> Hints | None:
        return super().look(tail, depth) if depth == 0 else None


def gained_by(predicted: list[int], probs: list[float], floor: float = 0.0) -> float:
    """What a head gained that was run over the root, where a table guesses 5 with a chance of 0.6."""
    head = DraftedHints("head")
    sources = [AfterRoot("table", [5], [1], [0.02, 0.6]), head]
    record = PassRecord()
    record.floor = floor
    blend = Blend(sources, new_learned(sources, NO_PRIORS))
    noted: list[float] = []
    record.note_pass = lambda *noting: noted.append(noting[2])  # type: ignore[method-assign]
    growth = ExpandingBlend(blend, [1], BlendLimits(8, 4, 1e-4), head.add, record, max_depth=None, is_timed=False)
    assert growth.tree().tokens == (1, 5)
    frontier = growth.frontier()
    assert frontier is not None
    assert frontier.tokens == [1]
    growth.grow(np.array([predicted], np.int32), np.array([probs], np.float32))
    return noted[0]


def test_likelier_or_less_likely_is_no_gain() -> None:
    """The tree has the same node as before, whether the head agrees or has another opinion about it."""
    assert gained_by([5], [0.9]) == 0.0
    assert gained_by([5], [0.01]) == 0.0


def test_new_nodes_are_gained() -> None:
    unlikely, likely = (gained_by([5, 7], [0.05, prob]) for prob in (0.1, 0.9))
    assert 0.0 < unlikely < likely <= 1.0


def test_nodes_that_are_cut_off_anyway_do_not_count() -> None:
    assert gained_by([5, 7], [0.05, 0.1], floor=0.5) == 0.0
    below, above = (gained_by([5, 7], [0.05, 0.9], floor=floor) for floor in (0.0, 0.1))
    assert above == pytest.approx(below - 0.1)


def grown(trust: Trust, *, is_timed: bool, predicted: int | None = 7) -> ExpandingBlend:
    """A tree with 5, which a table guesses after the text, and 7, if a head was run that predicts it."""
    head = DraftedHints("head")
    sources = [AfterRoot("table", [5], [1], [0.02, 0.3]), head]
    record = PassRecord()
    record.note_cycle(1.0)
    record._seconds[0].note(0.2)  # worth as much as 0.26 of the 1.3 tokens that are expected in a second
    blend, limits = Blend(sources, new_learned(sources, NO_PRIORS)), BlendLimits(8, 4, 1e-4)
    growth = ExpandingBlend(blend, [1], limits, head.add, record, max_depth=None, is_timed=is_timed, trust=trust)
    if predicted is not None:
        assert growth.frontier() is not None
        growth.grow(np.array([[predicted]], np.int32), np.array([[0.5]], np.float32))
    return growth


def test_a_request_trusts_passes_as_far_as_their_nodes_come_true() -> None:
    before = Trust()
    kept, broken = Trust(before), Trust(before)
    growth = grown(kept, is_timed=True)
    assert growth.tree().tokens == (1, 7, 5)
    for _ in range(3):
        growth.note(3, [7, 9])
    assert kept.share > 1.0
    growth = grown(broken, is_timed=True)
    for _ in range(60):
        growth.note(3, [5, 9])  # what the table had guessed, whatever the head says
    assert broken.share < 0.4
    assert broken.share < before.share < kept.share
    assert grown(kept, is_timed=True, predicted=None).frontier() is not None
    assert grown(broken, is_timed=True, predicted=None).frontier() is None
    assert grown(broken, is_timed=False, predicted=None).frontier() is not None  # time does not matter


def test_trees_to_which_passes_added_nothing_say_nothing() -> None:
    trust = Trust()
    grown(trust, is_timed=True, predicted=None).note(2, [7, 9])
    grown(trust, is_timed=True, predicted=5).note(2, [5, 9])  # the table had it too
    assert trust.share == 1.0


def test_nodes_that_were_cut_off_say_nothing() -> None:
    trust = Trust()
    growth = grown(trust, is_timed=True)
    growth.note(1, [7, 9])
    assert trust.share == 1.0


def test_a_head_is_tried_again_after_texts_that_it_was_bad_at() -> None:
    shared = Trust()
    for _ in range(40):  # requests
        bad = Trust(shared)
        for _ in range(20):
            grown(bad, is_timed=True).note(3, [5, 9]) if is_run(bad) else None
    assert shared.share < 0.9
    made = 0
    for _ in range(100):
        good = Trust(shared)
        for _ in range(20):
            if is_run(good):
                made += 1
                grown(good, is_timed=True).note(3, [7, 9])
    assert made > 1000  # of 2,000


def is_run(trust: Trust) -> bool:
    return grown(trust, is_timed=True, predicted=None).frontier() is not None


def test_what_passes_leave_behind_is_summed_up_several_cycles_at_a_time() -> None:
    """NumPy takes long when the caches hold other things. The sums are those of the cycles one by one."""
    rng, aftermath = random.Random(1), Aftermath()
    products, weight, num_sums, last = np.zeros((5, 5)), 0.0, 0, None
    for number in range(1, 101):
        before = aftermath._products
        shape, seconds = CycleShape(rng.randint(1, 8), 50 * number, rng.random() < 0.5), rng.uniform(0.01, 0.02)
        aftermath.note(shape, seconds)
        num_sums += aftermath._products is not before
        longer = shape.context / PER_CONTEXT
        row = np.array([shape.positions, longer, shape.positions * longer, shape.has_passes, seconds])
        if last is not None:
            products = CYCLE_DECAY * products + np.outer(row - last, row - last)
            weight = CYCLE_DECAY * weight + 1.0
        last = row
    assert num_sums == 99 // COMPUTE_EVERY
    aftermath.fade()  # with the last few
    assert aftermath._products == pytest.approx(FADED * products[:-1, :-1])
    assert aftermath._sums == pytest.approx(FADED * products[:-1, -1])
    assert aftermath._squares == pytest.approx(FADED * products[-1, -1])
    assert aftermath._weight == pytest.approx(FADED * weight)


@pytest.mark.parametrize("left_behind", [0.0, 0.0015])
def test_a_machine_that_gets_quicker_says_nothing_about_what_passes_leave_behind(left_behind: float) -> None:
    """Fewer passes are made while it is quick. That passes slow the rest down must not follow from it."""
    rng, aftermath, found = random.Random(1), Aftermath(), list[float]()
    for number in range(800):
        is_quick = 300 <= number < 450
        shape = CycleShape(rng.randint(1, 8), 100 + 5 * (number % 40), rng.random() < (0.3 if is_quick else 0.9))
        seconds = 0.008 + 0.0005 * shape.positions + 4e-6 * shape.context + left_behind * shape.has_passes
        aftermath.note(shape, seconds * (0.65 if is_quick else 1.0) * rng.uniform(0.95, 1.05))
        found.append(aftermath.seconds)
    assert max(abs(seconds - left_behind) for seconds in found[200:]) < 0.0006


@pytest.mark.parametrize("num_requests", [1, 2])
def test_cycles_apart_are_not_compared(num_requests: int) -> None:
    """Requests with passes took long, others did not: that may be the machine. So it is if batches ran in between."""
    record = PassRecord()
    record.note_cycle(0.01)
    for number in range(100):
        if num_requests == 1:
            record.note_request()
        else:
            record.note_cycle(0.02, num_requests)
        has_passes = number % 2 == 0
        record.note_cycle(0.02 if has_passes else 0.01, 1, CycleShape(4, 100, has_passes))
    assert record._aftermath.seconds == 0.0
