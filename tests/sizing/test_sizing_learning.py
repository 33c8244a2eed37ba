"""What sizing learns about guesses: from which cycles, for which requests, and how fast."""

from __future__ import annotations

import pytest

from draftwood.sizing.chances import PRIOR_TRIALS, TRUST, AcceptanceRecord
from draftwood.sizing.sizer import DRAFTER_DECAY, REQUEST_DECAY, Experience
from draftwood.tree import DraftTree, TreeBuilder
from tests.tools.sizing import CHAIN, cut, play, sizer

KIND = ("test", 5, 1, False)


def test_rates_move_from_estimates_to_observations() -> None:
    record = AcceptanceRecord(1.0)
    assert record.rate(KIND, 0.4) == pytest.approx(0.4)
    record.note(KIND, True)
    assert record.rate(KIND, 0.4) == pytest.approx((1 + PRIOR_TRIALS * 0.4) / (1 + PRIOR_TRIALS))
    for _ in range(999):
        record.note(KIND, False)
    assert record.rate(KIND, 0.4) < 0.01
    assert record.rate(("test", 5, 2, False), 0.4) == pytest.approx(0.4)  # another kind


def test_rare_guesses_keep_their_estimates_for_longer() -> None:
    """25 wrong guesses in a row are what a rate of 0.01 usually brings, and a sign against one of 0.5."""
    record = AcceptanceRecord(1.0)
    for _ in range(25):
        record.note(KIND, False)
    assert record.rate(KIND, 0.01) > 0.008
    assert record.rate(KIND, 0.5) < 0.06
    for _ in range(25):
        record.note(KIND, True)
    assert record.rate(KIND, 0.0001) > 0.4  # what happened often is not rare


def test_old_observations_count_less() -> None:
    record = AcceptanceRecord(0.9)
    for right in [True] * 100 + [False] * 20:
        record.note(KIND, right)
    trials, hits = 1.0 / (1.0 - 0.9), 0.9**20 / (1.0 - 0.9)
    assert record.rate(KIND, 0.5) == pytest.approx((hits + PRIOR_TRIALS * 0.5) / (trials + PRIOR_TRIALS), rel=1e-3)


def test_request_starts_from_earlier_observations() -> None:
    drafter = AcceptanceRecord(DRAFTER_DECAY)
    first = AcceptanceRecord(REQUEST_DECAY, drafter)
    for _ in range(200):
        first.note(KIND, True)
    second = AcceptanceRecord(REQUEST_DECAY, drafter)
    assert second.rate(KIND, 0.0) == pytest.approx(drafter.rate(KIND, 0.0))
    assert drafter.rate(KIND, 0.0) > 0.9
    for _ in range(20):
        second.note(KIND, False)
    assert second.rate(KIND, 0.0) < 0.4  # its own observations count most
    assert drafter.rate(KIND, 0.0) > 0.8
    assert first.rate(KIND, 0.0) > 0.9


def test_running_requests_learn_from_each_other() -> None:
    drafter = AcceptanceRecord(DRAFTER_DECAY)
    one, other = AcceptanceRecord(REQUEST_DECAY, drafter), AcceptanceRecord(REQUEST_DECAY, drafter)
    assert one.rate(KIND, 0.1) == pytest.approx(0.1)
    for _ in range(100):
        other.note(KIND, True)
    assert one.rate(KIND, 0.1) > 0.8


def test_next_request_keeps_learned_rates() -> None:
    drafter = Experience()
    assert len(cut(sizer(drafter=drafter), CHAIN)) > 1  # the source is confident
    play(sizer(drafter=drafter), [0] * 60)
    assert len(cut(sizer(drafter=drafter), CHAIN)) == 1


def test_rates_are_kept_per_source_depth_and_estimate() -> None:
    builder = TreeBuilder(0)
    good = builder.add(0, 1, "good", 0.6)
    builder.add(0, 2, "bad", 0.6)
    builder.add(0, 3, "good", 0.1)
    builder.add(good, 4, "good", 0.6)
    tree = builder.build()
    by = sizer()
    for _ in range(100):
        by.note(tree, tree, [1, 999])
    steep = cut(by, tree)
    assert steep.tokens == (0, 1)
    for _ in range(100):
        by.note(tree, tree, [1, 4, 999])
    assert set(cut(by, tree).tokens) == {0, 1, 4}


def test_correct_guesses_are_correlated() -> None:
    by = play(sizer(), ([7] * 20 + [0] * 20) * 5)
    assert len(cut(by, CHAIN)) == 1  # it ended in a run of wrong ones
    by.note(CHAIN, CHAIN.first(1), [1])  # a guess that was not verified would have been right
    assert len(cut(by, CHAIN)) > 1


def test_cycles_without_guesses_are_ignored() -> None:
    by, same = play(sizer(), [7, 0, 7]), play(sizer(), [7, 0, 7])
    for _ in range(50):
        by.note(CHAIN.first(1), CHAIN.first(1), [5])
    assert by._guesses.chances(CHAIN) == same._guesses.chances(CHAIN)


def test_unverified_guesses_count_as_far_as_known() -> None:
    verified, unverified = sizer(), sizer()
    for _ in range(30):
        verified.note(CHAIN, CHAIN, [99])
        unverified.note(CHAIN, CHAIN.first(1), [99])
    assert verified._guesses.chances(CHAIN) == unverified._guesses.chances(CHAIN)
    # One emitted token decides the first guess only; the bonus token after it decides the second.
    first, second = sizer(), sizer()
    for _ in range(200):
        first.note(CHAIN, CHAIN.first(1), [1])
        second.note(CHAIN, CHAIN.first(2), [1, 99])
    doubtful = DraftTree.chain(list(range(8)), "test", [1.0, *[0.95] * 7])
    assert first._guesses.chances(doubtful)[:2] == pytest.approx([1.0, TRUST * 0.95], abs=0.01)
    assert second._guesses.chances(doubtful)[:2] == pytest.approx([1.0, 0.0], abs=0.05)


def test_unprofitable_guesses_return_when_correct_again() -> None:
    by = play(sizer(), [0] * 100)
    sizes = []
    for _ in range(40):
        part = cut(by, CHAIN)
        sizes.append(len(part))
        by.note(CHAIN, part, [*CHAIN.tokens[1 : len(part)], CHAIN.tokens[len(part) % 8]])
    assert sizes[0] == 1
    assert sizes[-1] == 8


def test_learned_rates_are_believed() -> None:
    """A calibrated drafter is taken at its word, from the first cycle on and after many others."""
    doubtful = DraftTree.chain(list(range(8)), "test", [1.0, *[0.6] * 7])
    by = sizer(drafter=Experience(is_calibrated=True))
    assert by._guesses.chances(doubtful)[:2] == pytest.approx([0.6, 0.36])
    play(by, [1, 0, 0, 0, 0, 0], doubtful)  # a few cycles are chance
    assert by._guesses.chances(doubtful)[0] == pytest.approx(0.6, abs=0.06)
    assert sizer()._guesses.chances(doubtful)[0] == pytest.approx(TRUST * 0.6)
