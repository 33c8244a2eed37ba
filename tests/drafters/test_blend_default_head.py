"""The head that `blend` has by default: it is used where its passes pay, and left where they do not."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from draftwood import LLM, SamplingParams
from draftwood.drafters import blend_head
from draftwood.drafters.blend_options import TABLES
from draftwood.growth import CycleShape
from draftwood.growth.expanding import ENOUGH_PASSES, FIRST_SHARE, LOOK_AGAIN, Aftermath, PassRecord
from draftwood.sizing import CostProfile, LiveCosts
from draftwood.text.bytes import ByteTokenizer
from tests.tools.neural import (
    _one_thread,  # noqa: F401 - a fixture
    clock_target,
    clock_text,
    perfect_head,
    saved_head,
)


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A head for the clock, which ships with the package as far as `blend` can tell."""
    folder = Path(saved_head(perfect_head("eagle3")))
    monkeypatch.setattr(blend_head, "any_head_fits", lambda *_: True)
    monkeypatch.setattr(blend_head, "find_shipped_head", lambda *_: SimpleNamespace(folder=folder))
    return folder


def test_a_shipped_head_is_used_where_it_pays(shipped: Path) -> None:
    own = LLM.from_target(clock_target(), ByteTokenizer(), drafter="blend", budget=12)
    assert own._default._shared.sources == "context+transition+position+head"
    asked = LLM.from_target(clock_target(), ByteTokenizer(), drafter="blend", drafter_options={"head": str(shipped)})
    assert asked._default._shared.sources == own._default._shared.sources
    tables = LLM.from_target(clock_target(), ByteTokenizer(), drafter="blend", drafter_options={"sources": TABLES})
    assert tables._default._shared.head is None
    text, params = clock_text(3, 5), SamplingParams(max_tokens=16)
    assert own.generate([text], params)[0].token_ids == tables.generate([text], params)[0].token_ids


@pytest.mark.parametrize(("last", "runs"), [(1.1, True), (3.0, False)])
def test_the_head_of_the_default_is_left_out_where_positions_are_dear(
    last: float, runs: bool, shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, params = clock_text(3, 5), SamplingParams(max_tokens=16)
    for asked in (False, True):
        options = {"head": str(shipped)} if asked else {}
        llm = LLM.from_target(clock_target(), ByteTokenizer(), drafter="blend", drafter_options=options, budget="auto")
        llm.engine._costs = LiveCosts(CostProfile((1, 4), (16,), ((1.0, last),)))  # hours, for this machine's clock
        model, num_passes = llm._default._shared.head.model, list[int]()
        forward = model.forward
        monkeypatch.setattr(model, "forward", lambda *args, run=forward, to=num_passes: (to.append(1), run(*args))[1])
        answers = llm.generate([text, text], params)
        assert {tuple(answer.token_ids) for answer in answers} == {tuple(llm.generate([text], params)[0].token_ids)}
        assert bool(num_passes) == (runs or asked)


def passes_made(record: PassRecord, *, is_timed: bool, chances: float = 1.0, expected: float = 2.0) -> bool:
    return record.is_worth(0, chances, expected, 0.0, is_timed=is_timed)


def test_a_pass_is_made_if_it_gains_more_than_its_time() -> None:
    record = PassRecord()
    assert passes_made(record, is_timed=True)  # nothing is known: try
    record.note_cycle(0.010)
    record.note_pass(0, 1.0, FIRST_SHARE, 0.001)  # half a token for a tenth of the time of two
    assert passes_made(record, is_timed=True)
    slow = PassRecord()
    slow.note_cycle(0.010)
    slow.note_pass(0, 1.0, FIRST_SHARE, 0.010)
    assert not passes_made(slow, is_timed=True)
    assert passes_made(slow, is_timed=False)
    assert not passes_made(slow, is_timed=False, chances=0.01)


@pytest.mark.parametrize(("seconds", "left_out"), [(0.002, False), (0.003, True)])
def test_a_slow_head_is_left_out_and_looked_at_again(seconds: float, left_out: bool) -> None:
    record = PassRecord()
    record.note_pass(0, 1.0, FIRST_SHARE, 5.0)  # the very first one reads the weights
    for _ in range(2):
        assert not record.is_left_out()  # nothing is known, or it is time to look again
        record.note_cycle(0.010)
        for number in range(ENOUGH_PASSES):
            assert not record.is_too_slow, number
            record.note_pass(0, 1.0, FIRST_SHARE, seconds)
        assert record.is_too_slow is left_out
        found = [record.is_left_out() for _ in range(LOOK_AGAIN - 1)]
        assert found == [left_out] * (LOOK_AGAIN - 1)
        if not left_out:
            return
    for number in range(3 * LOOK_AGAIN):  # passes of batches are not measured: the last verdict holds
        record.note_pass(0, 1.0, FIRST_SHARE, 0.0001, num_requests=8)
        assert record.is_left_out() is (number % LOOK_AGAIN > 0), number


def test_looks_at_a_slow_head_add_up() -> None:
    """Answers may be too short for one look to measure it."""
    record = PassRecord()
    record.note_pass(0, 1.0, FIRST_SHARE, 5.0)
    record.note_cycle(0.010)
    for _ in range(ENOUGH_PASSES):
        record.note_pass(0, 1.0, FIRST_SHARE, 0.004)
    num_looks = 0
    for _ in range(4 * LOOK_AGAIN):
        if not record.is_left_out():
            num_looks += 1
            record.note_cycle(0.010)
            for _ in range(ENOUGH_PASSES - 4):
                record.note_pass(0, 1.0, FIRST_SHARE, 0.0005)  # it is quick now
    assert num_looks > 2 * LOOK_AGAIN


@pytest.mark.parametrize("left_behind", [0.0, 0.0015])
def test_what_passes_leave_behind_counts(left_behind: float) -> None:
    """Passes that push the target out of the caches take longer than they seem to, whatever else differs."""
    rng, record = random.Random(1), PassRecord()
    errors = list[float]()
    for number in range(300):
        positions, context = rng.randint(1, 6), 100 + 5 * number
        # Passes are made more often where more positions are verified and contexts are short.
        has_passes = rng.random() < 0.3 + 0.1 * positions - 0.0002 * context
        seconds = 0.006 + positions * (0.0004 + context * 2e-7) + left_behind * has_passes
        record.note_cycle(seconds * rng.uniform(0.95, 1.05), shape=CycleShape(positions, context, has_passes))
        if has_passes:
            record.note_pass(0, 1.0, FIRST_SHARE, 0.0012)
        if number > 80:
            errors.append(abs(record._aftermath.seconds - left_behind))
    assert max(errors) < 0.0004
    assert record.is_too_slow == (left_behind > 0.0)
    assert passes_made(record, is_timed=True, chances=0.7) == (left_behind == 0.0)


def test_what_passes_leave_behind_is_known_from_any_cycles() -> None:
    """Cycles that are alike, and few new ones after old ones, whatever their number."""
    rng = random.Random(2)
    for _ in range(60):
        aftermath, alike = Aftermath(), CycleShape(rng.randint(1, 3), rng.choice((0, 500, 100_000)), rng.random() < 0.5)
        for _ in range(rng.randint(1, 120)):
            if rng.random() < 0.1:
                aftermath.fade()
            shape = alike if rng.random() < 0.9 else alike._replace(has_passes=not alike.has_passes)
            aftermath.note(shape, 0.01 * rng.uniform(0.9, 1.1))
            assert 0.0 <= aftermath.seconds < 0.003


@pytest.mark.usefixtures("shipped")
def test_a_request_goes_on_without_a_head_that_is_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("is_too_slow", "_is_measured"):
        monkeypatch.setattr(PassRecord, name, property(lambda self: self.num_passes > 3))
    text, params = clock_text(3, 5), SamplingParams(max_tokens=40)
    llm = LLM.from_target(clock_target(), ByteTokenizer(), drafter="blend", budget=4, max_batch=2)
    model, num_passes, closed = llm._default._shared.head.model, list[int](), list[int]()
    forward, close = model.forward, model.close
    monkeypatch.setattr(model, "forward", lambda *args: (num_passes.append(1), forward(*args))[1])
    monkeypatch.setattr(model, "close", lambda sequence: (closed.append(sequence), close(sequence))[1])
    answers = [answer.token_ids for answer in llm.generate([text, text[2:]], params)]
    made = len(num_passes)
    assert 0 < made < 40
    assert len(closed) == 2
    assert answers == [answer.token_ids for answer in llm.generate([text, text[2:]], params, drafter="plain")]
    assert answers[0] == llm.generate([text], params)[0].token_ids
    assert len(num_passes) == made  # the next request begins without it


def test_a_pass_that_gained_nothing_is_tried_again_seldom() -> None:
    record = PassRecord()
    record.note_cycle(0.010)
    made = 0
    for _ in range(400):
        if passes_made(record, is_timed=True):
            made += 1
            record.note_pass(0, 1.0, 0.0, 0.002)
    assert 5 < made < 100
