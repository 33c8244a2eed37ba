"""Batches draft, and take turns, only where that is quicker, by a clock of the test."""

from __future__ import annotations

import pytest

from draftwood.engine.ways import (
    AFTER_CLEAR,
    FIRST_STAY,
    MAX_STAY,
    MAX_TRIAL,
    MIN_IN_TURNS,
    MIN_REQUESTS,
    NO_GUESSES,
    SOON,
    TRIAL,
    UNCOUNTED,
    Batch,
    Measured,
    Way,
    Ways,
)


class Requests:
    """Emit tokens by a clock of their own: ``seconds`` per pass and tokens per pass, with drafts and without."""

    def __init__(self, size: int = 32, *, may_turn: bool = False, may_rest: bool = True) -> None:
        self.now, self.tokens = 0.0, 0
        self.ways = Ways(lambda: self.now)
        self.batch = Batch(size, may_rest, may_turn)

    def resize(self, size: int) -> None:
        self.batch = self.batch._replace(size=size)

    def run(self, num_passes: int, with_drafts: tuple[float, int], without: tuple[float, int]) -> list[bool]:
        ways = []
        for _ in range(num_passes):
            ways.append(self.ways.of(self.batch).drafts)
            self.finish(*(with_drafts if ways[-1] else without))
        return ways

    def run_in_turns(
        self, num_passes: int, *, host: float, device: float, together: float = 1.0, in_halves: float = 2.0
    ) -> list[bool]:
        """``host``: seconds for the drafts of all requests; ``device``: for their pass. A half takes the host half of
        that and the device as long, if both work at once; ``together``: all at once take so many times less.
        ``in_halves``: what two halves are believed to take, in passes."""
        turns = []
        for _ in range(num_passes):
            turns.append(self.ways.of(self.batch).turns)
            if turns[-1]:
                self.finish(max(host / 2.0, device), 50)
            else:
                self.finish((host + device) / together, 100, in_halves * device)
        return turns

    def finish(self, seconds: float, tokens: int, in_halves: float = 0.0, num_read: int = 0) -> None:
        way = self.ways.of(self.batch)
        self.now += seconds
        self.tokens += tokens
        self.ways.note(self.batch, way, Measured(tokens, num_read, in_halves))


@pytest.mark.parametrize(("rate", "drafts"), [(2.0, True), (1.1, True), (0.9, False), (0.2, False)])
def test_the_quicker_way_stays(rate: float, drafts: bool) -> None:
    batch = Requests()
    ways = batch.run(4000, (2.0, round(200 * rate)), (1.0, 100))
    assert ways.count(drafts) > 0.97 * len(ways)
    assert ways.count(not drafts) > 0  # the other way is tried again
    best = max(rate, 1.0) * 100.0
    assert batch.tokens / batch.now > 0.95 * best


def test_a_change_is_noticed() -> None:
    batch = Requests()
    batch.run(2000, (2.0, 100), (1.0, 100))
    later = batch.run(2 * MAX_STAY, (2.0, 400), (1.0, 100))
    assert all(later[-FIRST_STAY // 2 :])


def test_a_first_trial_that_was_slow_is_repeated_soon() -> None:
    """While kernels are compiled for the first time, plain decoding may seem slower than it is."""
    batch = Requests()
    batch.run(TRIAL[True], (4.0, 80), (1.0, 32))
    batch.run(TRIAL[False] + UNCOUNTED, (4.0, 80), (2.7, 32))
    assert batch.ways.of(batch.batch).drafts
    later = batch.run(2 * AFTER_CLEAR * SOON, (4.0, 80), (1.0, 32))
    assert not any(later[AFTER_CLEAR * SOON + 2 * TRIAL[False] :])


def test_drafts_that_gained_only_at_first_are_left() -> None:
    """Long before another way would be tried again: a clear trial is believed for long."""
    batch = Requests()
    assert all(batch.run(TRIAL[True], (2.0, 400), (1.0, 100)))
    batch.run(TRIAL[False] + 2 * UNCOUNTED + 10, (2.0, 400), (1.0, 100))
    later = batch.run(FIRST_STAY, (2.0, 180), (1.0, 100))
    assert 0 < later.count(True) < FIRST_STAY // 2
    assert not any(later[FIRST_STAY // 2 :])


def test_few_requests_always_draft() -> None:
    assert all(Requests(MIN_REQUESTS - 1).run(1000, (9.0, 1), (1.0, 100)))


def test_other_sizes_begin_with_the_way_of_the_nearest() -> None:
    batch = Requests(64)
    batch.run(100, (2.0, 100), (1.0, 100))  # drafts are slower
    batch.resize(8)
    assert not any(batch.run(FIRST_STAY, (1.0, 50), (1.0, 10)))
    later = batch.run(FIRST_STAY, (1.0, 50), (1.0, 10))  # here they are quicker
    assert all(later)
    batch.resize(64)
    assert not any(batch.run(20, (2.0, 100), (1.0, 100)))


def test_a_clear_trial_is_short() -> None:
    batch = Requests()
    ways = batch.run(400, (2.0, 100), (1.0, 100))
    assert ways.count(True) <= TRIAL[True] + UNCOUNTED
    again = batch.run(2 * AFTER_CLEAR * FIRST_STAY, (2.0, 100), (1.0, 100))
    assert 0 < again.count(True) < TRIAL[True] // 2 + UNCOUNTED


def test_a_trial_of_drafts_without_guesses_is_short() -> None:
    """No guess was worth verifying, so drafts only take time: even where little of it, and less by chance."""
    batch, tried = Requests(), list[bool]()
    batch.run(TRIAL[True] + UNCOUNTED + TRIAL[False], (1.1, 100), (1.0, 100))
    for _ in range(4 * FIRST_STAY):
        way = batch.ways.of(batch.batch)
        tried.append(way.drafts)
        batch.now += 0.99 if way.drafts else 1.0
        batch.ways.note(batch.batch, way, Measured(100, 0, 0.0, has_guesses=not way.drafts))
    assert 0 < tried.count(True) <= 2 * (NO_GUESSES + UNCOUNTED)


def test_what_waiting_drafters_take_does_not_count() -> None:
    """A trial without drafts takes as long as one with them, as drafters that cannot come back go on reading."""
    batch = Requests()
    for _ in range(100):
        way = batch.ways.of(batch.batch)
        batch.now += 1.0
        waiting = 0.0 if way.drafts or not batch.ways.is_trial(batch.batch) else 0.5
        batch.ways.note(batch.batch, way, Measured(150 if way.drafts else 100, 0, 0.0, waiting=waiting))
    assert not batch.ways.of(batch.batch).drafts


def test_single_slow_passes_decide_nothing() -> None:
    """Such as the first one of a size, which compiles kernels."""
    batch = Requests()
    for number in range(400):
        batch.run(1, (100.0 if number < 3 or number % 12 == 5 else 1.0, 150), (1.0, 100))
    ways = batch.run(200, (1.0, 150), (1.0, 100))
    assert ways.count(True) > 0.9 * len(ways)


def test_passes_that_do_not_count_and_idle_time_change_nothing() -> None:
    batch = Requests()
    for _ in range(500):
        batch.now += 100.0
        batch.ways.note(batch.batch, batch.ways.of(batch.batch), Measured(0, 0, 0.0), counts=False)
        assert batch.ways.of(batch.batch).drafts
        batch.ways.rest()
        batch.finish(1.0, 1)


@pytest.mark.parametrize("num_read", [20, 400])
def test_what_drafts_cost_prompts_counts(num_read: int) -> None:
    """Drafts are quicker, but prompts are read more slowly with them, every fourth pass."""
    batch, ways = Requests(), list[bool]()
    for _ in range(2000):
        ways += batch.run(3, (1.0, 150), (1.0, 100))
        reading = 0.01 if batch.ways.of(batch.batch).drafts else 0.001
        batch.finish(1.0 + reading * num_read, 100, num_read=num_read)
    assert ways.count(num_read < 100) > 0.9 * len(ways)


def test_a_trial_that_cannot_be_measured_is_given_up() -> None:
    """Every pass reads a prompt: drafts stay, as nothing says that plain decoding is quicker."""
    batch = Requests()
    batch.run(TRIAL[True] + UNCOUNTED + 1, (1.0, 300), (1.0, 100))
    assert not batch.ways.of(batch.batch).drafts  # a trial
    ways = list[bool]()
    for _ in range(500):
        ways.append(batch.ways.of(batch.batch).drafts)
        batch.finish(1.5, 300 if ways[-1] else 100, num_read=50)
    assert all(ways[MAX_TRIAL * TRIAL[False] :])


def test_a_first_prompt_of_few_tokens_does_not_decide_what_prompts_cost() -> None:
    batch, ways = Requests(), list[bool]()
    for number in range(1000):
        ways += batch.run(3, (1.0, 150), (1.0, 100))
        reading = 0.01 if batch.ways.of(batch.batch).drafts else 0.001
        num_read = 1 if number < 5 else 400
        batch.finish(1.0 + reading * num_read, 100, num_read=num_read)
    assert ways[1500:].count(False) > 0.9 * len(ways[1500:])


def test_passes_of_another_way_do_not_count() -> None:
    batch = Requests()
    for _ in range(500):
        batch.now += 1.0
        way = batch.ways.of(batch.batch)
        batch.ways.note(batch.batch, way._replace(drafts=not way.drafts), Measured(100, 0, 0.0))
        assert batch.ways.of(batch.batch) == way


def test_a_full_batch_and_one_that_is_nearly_full_decide_together() -> None:
    batch = Requests(32)
    batch.run(100, (2.0, 100), (1.0, 100))
    batch.resize(31)
    assert not batch.ways.of(batch.batch).drafts
    assert not batch.ways.is_trial(batch.batch)


def test_batches_that_cannot_rest_say_nothing_about_drafts() -> None:
    batch = Requests(may_turn=True, may_rest=False)
    batch.run_in_turns(300, host=1.0, device=1.5)
    batch.batch = batch.batch._replace(may_rest=True)
    assert batch.ways.is_trial(batch.batch)


# -- turns -----------------------------------------------------------------------------------------------------------


def test_a_host_that_waits_most_of_the_time_never_takes_turns() -> None:
    assert not any(Requests(may_turn=True, may_rest=False).run_in_turns(1000, host=1.0, device=1.5))


def test_a_busy_host_takes_turns_where_that_is_quicker() -> None:
    turns = Requests(may_turn=True, may_rest=False).run_in_turns(2000, host=2.0, device=1.0)
    assert turns.count(True) > 0.95 * len(turns)
    assert turns.count(False) > 0  # the other way is tried again


def test_a_busy_host_does_not_take_turns_where_that_is_slower() -> None:
    batch = Requests(may_turn=True, may_rest=False)
    turns = batch.run_in_turns(
        2000, host=2.0, device=1.0, together=2.0, in_halves=1.2
    )  # they take longer than it seems
    assert 0 < turns.count(True) < 0.1 * len(turns)


def test_turns_that_cannot_gain_much_are_not_tried() -> None:
    batch = Requests(may_turn=True, may_rest=False)
    assert not any(batch.run_in_turns(2000, host=2.0, device=1.0, together=2.0, in_halves=1.4))


@pytest.mark.parametrize(("size", "may_turn"), [(MIN_IN_TURNS - 1, True), (100, False)])
def test_some_batches_cannot_take_turns(size: int, may_turn: bool) -> None:
    assert not any(Requests(size, may_turn=may_turn).run_in_turns(500, host=2.0, device=1.0))


def test_a_host_that_is_busy_with_drafts_does_not_take_turns_without_them() -> None:
    """Drafts keep the host busy and gain nothing; without them it waits for the target."""
    requests = Requests(may_turn=True)
    seen = set[Way]()
    for _ in range(1000):
        way = requests.ways.of(requests.batch)
        seen.add(way)
        if way.drafts:
            requests.finish(2.0, 50 if way.turns else 100, 0.9)
        else:
            requests.finish(1.0, 50 if way.turns else 100, 1.5)
    assert Way(drafts=False, turns=True) not in seen
    assert requests.ways.of(requests.batch) == Way(drafts=False, turns=False)


def test_a_smaller_batch_that_cannot_take_turns_keeps_its_drafts() -> None:
    requests = Requests(may_turn=True)
    for _ in range(400):
        way = requests.ways.of(requests.batch)
        requests.finish(1.0, (200 if way.turns else 150) if way.drafts else 50, 0.3)
    assert requests.ways.of(requests.batch) == Way(drafts=True, turns=True)
    requests.resize(MIN_IN_TURNS - 1)
    assert requests.ways.of(requests.batch) == Way(drafts=True, turns=False)
    assert not requests.ways.is_trial(requests.batch)
