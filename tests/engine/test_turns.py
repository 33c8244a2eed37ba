"""When the requests of a batch take turns."""

from __future__ import annotations

from draftwood.engine.turns import MIN_PASSES, MIN_REQUESTS, Turns


class Host:
    """Runs passes by a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = Turns(lambda: self.now)

    def run(self, num_passes: int, *, host: float, waited: float) -> bool:
        for _ in range(num_passes):
            self.now += host + waited
            self.turns.note(waited)
        return self.turns.pay(MIN_REQUESTS)


def test_a_host_that_waits_most_of_the_time_runs_all_together() -> None:
    assert not Host().run(100, host=1.0, waited=1.5)


def test_a_busy_host_takes_turns() -> None:
    host = Host()
    assert not host.run(MIN_PASSES, host=1.5, waited=1.0)  # the first pass has no beginning
    assert host.run(1, host=1.5, waited=1.0)
    assert not host.turns.pay(MIN_REQUESTS - 1)


def test_turns_end_when_the_device_becomes_slow() -> None:
    host = Host()
    assert host.run(50, host=1.5, waited=0.5)
    assert not host.run(50, host=0.5, waited=1.5)


def test_equal_shares_keep_what_was_decided() -> None:
    for first in (1.6, 0.4):
        host = Host()
        taken = host.run(50, host=first, waited=2.0 - first)
        assert host.run(50, host=1.0, waited=1.0) == taken


def test_time_without_requests_does_not_count() -> None:
    host = Host()
    for _ in range(20):
        host.now += 100.0
        host.turns.rest()
        assert not host.run(5, host=0.5, waited=1.5)
