"""Whether a draft model pays, by whole cycles and by trees that were grown both ways."""

from __future__ import annotations

import random

import pytest

from draftwood.growth import OwnWorth, Worth
from draftwood.growth.worth import CLEAR, MAX_STAY, MEASURED, MIN_PAIRS, SETTLING


def run_requests(
    record: Worth, ratio: float, price: float, count: int, cycles: int = 20, seed: int = 0
) -> tuple[list[bool], int]:
    """Which of so many requests begin with the model, and how many of these end without it. It has ``ratio`` times the
    tokens in ``price`` times the time, in the mean."""
    rng, begins, num_left = random.Random(seed), list[bool](), 0
    for _ in range(count):
        has_model = record.begins_with_model()
        begins.append(has_model)
        own = OwnWorth(record)
        for cycle in range(cycles):
            record.note_cycle(0.001 * rng.uniform(0.7, 1.3) * (price if has_model else 1.0), has_model=has_model)
            if has_model and cycle % 4 == 0:
                without = rng.randint(1, 4)
                own.note_tokens(round(ratio * without + rng.uniform(-0.5, 0.5)), without)
                if not own.pays:
                    has_model = False
                    num_left += 1
    return begins, num_left


@pytest.mark.parametrize("seed", range(5))
def test_a_model_that_pays_is_used(seed: int) -> None:
    begins, num_left = run_requests(Worth(), 1.6, 1.2, 100, seed=seed)
    assert begins[:3] == [True] * 3  # it is measured first
    assert begins[10:].count(False) <= 90 // MAX_STAY + 3
    assert num_left == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_model_that_does_not_pay_is_left_and_tried_again(seed: int) -> None:
    begins, num_left = run_requests(Worth(), 1.05, 1.4, 100, seed=seed)
    late = begins[20:]
    assert 1 <= late.count(True) <= 80 // MAX_STAY + 4
    assert num_left >= late.count(True)


def test_it_follows_texts_that_change() -> None:
    record = Worth()
    run_requests(record, 1.6, 1.2, 40)
    begins, _ = run_requests(record, 1.0, 1.2, 60)
    assert begins[40:].count(False) > 14
    begins, _ = run_requests(record, 1.8, 1.2, 400)
    assert begins[350:].count(True) > 40


def test_a_request_counts_for_itself() -> None:
    record = Worth()
    run_requests(record, 1.5, 1.2, 40)
    own, other = OwnWorth(record), OwnWorth(record)
    for _ in range(30):
        own.note_tokens(3, 3)
        other.note_tokens(5, 3)
    assert not own.pays
    assert other.pays


def test_nothing_is_left_before_both_ways_are_measured() -> None:
    record = Worth()
    own = OwnWorth(record)
    for _ in range(SETTLING + MEASURED[True]):
        assert record.begins_with_model()
        record.note_cycle(1.0, has_model=True)
        own.note_tokens(1, 1)
        assert own.pays
    for _ in range(SETTLING + MEASURED[False]):
        assert own.pays
        assert not record.begins_with_model()
        record.note_cycle(0.9 / CLEAR, has_model=False)
    assert not own.pays
    new = OwnWorth(record)  # which sees for itself first
    for _ in range(MIN_PAIRS):
        assert new.pays
        new.note_tokens(1, 1)
    assert not new.pays


def test_requests_that_begin_beside_others_measure_nothing() -> None:
    record = Worth()
    for _ in range(SETTLING + MEASURED[True]):
        record.note_cycle(1.0, has_model=True)
    assert [record.begins_with_model() for _ in range(50)] == [False, *[True] * 49]
    record.note_cycle(1.0, has_model=True)
    assert not record.begins_with_model()


def test_the_first_cycles_of_each_way_do_not_count() -> None:
    record = Worth()
    for has_model in (True, False):
        for _ in range(SETTLING):
            record.note_cycle(100.0, has_model=has_model)
        for _ in range(MEASURED[has_model]):
            record.note_cycle(0.001, has_model=has_model)
    assert record.pays(1.0)
    assert not record.pays(0.9)
