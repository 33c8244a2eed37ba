"""A draft model runs the levels that pay, by what paths reach and drafts take."""

from __future__ import annotations

import random

import pytest

from draftwood.growth.neural.levels import TRY_ALL_EVERY, LeveledDraft, LevelRecord

MOST = 7


def run(record: LevelRecord, chance: float, per_level: float, num_drafts: int = 400, requests: int = 1) -> list[int]:
    """The levels of the last drafts, if each level is accepted with ``chance`` given the one before it. The rest of a
    cycle takes one second."""
    rng, chosen = random.Random(1), list[int]()
    for _ in range(num_drafts):
        levels = record.choose(requests)
        chosen.append(levels)
        record.note_draft(requests, levels, 0.1 + per_level * levels)
        record.note_rest(requests, 1.0)
        accepted = next((level for level in range(levels) if rng.random() > chance), levels)
        record.note_path(levels, accepted)
    return chosen


def best_levels(chance: float, per_level: float) -> int:
    rates = [
        sum(chance**level for level in range(levels + 1)) / (1.1 + per_level * levels) for levels in range(MOST + 1)
    ]
    return max(range(1, MOST + 1), key=rates.__getitem__)


@pytest.mark.parametrize("per_level", [0.001, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("chance", [0.3, 0.6, 0.9])
def test_the_levels_that_pay_are_run(chance: float, per_level: float) -> None:
    chosen = run(LevelRecord(MOST), chance, per_level)[-200:]
    wanted = best_levels(chance, per_level)
    others = [levels for levels in chosen if levels != MOST]
    assert abs(sorted(others or chosen)[len(others or chosen) // 2] - wanted) <= 1


def test_all_levels_are_tried_again() -> None:
    record = LevelRecord(MOST)
    assert min(run(record, 0.2, 0.2)[-100:]) < 3
    assert run(record, 0.2, 0.2)[-TRY_ALL_EVERY:].count(MOST) == 1
    assert min(run(record, 0.98, 0.02)[-100:]) >= MOST - 1


def test_times_depend_on_the_number_of_requests() -> None:
    record = LevelRecord(MOST)
    run(record, 0.6, 0.3)
    assert min(run(record, 0.6, 0.001, requests=32)[-50:]) > min(run(record, 0.6, 0.3)[-50:])


def test_drafts_whose_passes_were_prepared_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("draftwood.growth.neural.levels.time.perf_counter", lambda: now)
    record, chosen = LevelRecord(MOST), list[int]()
    for number in range(12):
        draft = LeveledDraft(record, 1)
        chosen.append(draft.levels)
        now += 100.0 if number < 2 else 0.01 * draft.levels
        draft.end(counts=number >= 2)
        now += 1.0
        draft.note(draft.levels)
    assert min(chosen) == MOST


def test_chances_of_deep_levels_follow_from_those_before() -> None:
    record = LevelRecord(MOST)
    for _ in range(200):
        record.note_path(2, 2)
    chances = record.chances()
    assert min(chances) > 0.9
    assert chances == sorted(chances, reverse=True)
