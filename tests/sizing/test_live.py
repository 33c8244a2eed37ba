"""Costs without a measurement: an estimate, a short probe, and the passes that run anyway."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.sizing import costs, live
from draftwood.sizing.costs import SIZES, CostProfile, load_profile, measure_costs, save_profile
from draftwood.sizing.live import LiveCosts, estimate_costs, keep_costs, known_costs, probe_costs
from draftwood.sizing.sizer import Experience, Sizer
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import ByteTokenizer

INFO = tiny_target().info
STEEP = [1.0, 1.5, 1.9, 2.2, 3.1, 3.9, 5.6, 7.3, 10.0, 13.0, 19.0, 25.0]  # ARM cores without a matrix unit
FLAT = [1.0, 1.0, 1.05, 1.1, 1.1, 1.2, 1.2, 1.3, 1.5, 1.8, 2.4, 3.0]  # x86 cores with one


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "cache_home", lambda: tmp_path)
        yield tmp_path


class Clock:
    """Passes advance the clock by ``unit`` seconds times the relative cost of their size."""

    def __init__(
        self, unit: float, relative: list[float], patch: pytest.MonkeyPatch, slower: Callable[[], float] = lambda: 1.0
    ) -> None:
        """``slower``: so many times as long each pass takes."""
        self.now, self.passes = 0.0, list[int]()
        self._unit, self._relative, self._slower = unit, relative, slower
        patch.setattr(live, "time_pass", lambda _target, _sequence, size: self.run(size))
        patch.setattr(live.time, "perf_counter", lambda: self.now)

    def run(self, size: int) -> float:
        seconds = self._unit * self._relative[SIZES.index(size)] * self._slower()
        self.now += seconds
        self.passes.append(size)
        return seconds


def large_target() -> NativeTarget:
    """Its weights are said to take half a second to read."""
    target = tiny_target()
    target.info = replace(target.info, num_parameters=int(live.CPU_BANDWIDTH / 2), dtype=torch.uint8)
    return target


def probed(target: NativeTarget | None = None) -> LiveCosts:
    target = target or tiny_target()
    found = known_costs(target)
    probe_costs(target, found, found.largest)
    return found


@pytest.mark.parametrize("unit", [0.0005, 0.01, 0.05, 0.15, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("relative", [STEEP, FLAT])
def test_the_first_answer_waits_half_a_second_or_one_pass(
    unit: float, relative: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(unit, relative, monkeypatch)
    probed()
    assert clock.now <= 1.2 * live.PROBE_SECONDS + unit


def test_no_pass_is_timed_where_one_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(5.0, FLAT, monkeypatch)
    target = large_target()
    found = probed(target)
    assert clock.passes == []
    assert found.profile == estimate_costs(target.info, target.num_slots)
    assert load_profile(target.info) == found.profile


@pytest.mark.parametrize("unit", [0.01, 0.03])
@pytest.mark.parametrize("relative", [STEEP, FLAT])
def test_a_few_passes_show_the_kind_of_machine(
    unit: float, relative: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    Clock(unit, relative, monkeypatch)
    line = probed().profile.of(32, 16)
    truth = {size: unit * cost for size, cost in zip(SIZES, relative, strict=True)}
    assert line[0] == pytest.approx(truth[1], rel=0.1)
    for size in (2, 4, 8, 16, 32):
        assert line[size - 1] == pytest.approx(truth[size], rel=0.35)


@pytest.mark.parametrize("relative", [STEEP, FLAT])
def test_sizes_without_readings_follow_a_machine_that_gets_busy(
    relative: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else large trees would look cheap beside the small ones that are timed again."""
    Clock(0.01, relative, monkeypatch)
    found = probed()
    quiet = found.profile.of(32, 16)
    for number in range(200):
        size = (1, 2, 4)[number % 3]
        found.note(size, 2.0 * quiet[size - 1] / found.profile.of(32, 16)[size - 1])
    busy = found.profile.of(32, 16)
    assert busy[0] == pytest.approx(2.0 * quiet[0], rel=0.1)
    for size in (16, 32):
        assert busy[size - 1] > 1.8 * quiet[size - 1]


def test_an_estimate_needs_no_room_and_no_pass() -> None:
    target = tiny_target(cache_tokens=64)
    target.open(60)
    found = probed(target)
    assert found.largest == 32
    assert list(found.profile.seconds[0]) == sorted(found.profile.seconds[0])


def test_small_caches_and_gpus_have_estimates_too() -> None:
    for limit in (1, 2, 3, 10, 100):
        profile = estimate_costs(INFO, limit)
        assert profile.largest <= max(1, limit // 2)
        assert len(profile.of(4, 0)) == 4
    sizes = (1, 2, 4, 8, 16, 64, 128, 512)
    gpu = estimate_costs(replace(INFO, device=torch.device("cuda"), pass_sizes=sizes), 8192)
    assert gpu.stepped
    assert gpu.sizes == sizes
    assert gpu.of(64, 16)[-1] < 1.5 * gpu.of(1, 16)[0]


def play(found: LiveCosts, relative: list[float], unit: float, sizes: list[int], rounds: int = 40) -> Sizer:
    by = Sizer(found, Experience())
    for number in range(rounds):
        for size in sizes:
            slow = 3.0 if (number + size) % 5 == 0 else 1.0  # other processes disturb a fifth of the passes
            by.note_pass(size, 16, unit * slow * relative[SIZES.index(size)])
    return by


@pytest.mark.parametrize("relative", [STEEP, FLAT])
def test_passes_that_run_correct_the_curve(relative: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(5.0, FLAT, monkeypatch)
    found = probed(large_target())
    play(found, relative, 0.02, [1, 2, 4, 8, 16])
    line = found.profile.of(32, 16)
    for size in (1, 2, 4, 8, 16):
        assert line[size - 1] == pytest.approx(0.02 * relative[SIZES.index(size)], rel=0.25)
    assert list(line) == sorted(line)


def test_a_single_slow_pass_hardly_counts() -> None:
    found = LiveCosts(estimate_costs(INFO, 512))
    before = found.profile.of(64, 16)
    by = Sizer(found, Experience())
    by.note_pass(4, 16, 5.0 * float(before[3]))
    assert found.profile.of(64, 16)[3] < 1.5 * before[3]
    for _ in range(6):
        by.note_pass(4, 16, float(before[3]))
    assert found.profile.of(64, 16) == pytest.approx(before, rel=0.05)


def test_a_refined_curve_serves_the_running_request_and_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(5.0, FLAT, monkeypatch)
    target = large_target()
    found = probed(target)
    assert found.seconds(8, 16)[7] > 0.1
    play(found, FLAT, 0.02, [1, 4, 8])
    assert found.seconds(8, 16)[7] < 0.05
    assert load_profile(target.info) != found.profile
    keep_costs(target.info, found)
    assert known_costs(target).profile == found.profile
    assert not known_costs(target).is_estimate


def test_drawn_trees_keep_the_first_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed gives the same samples in this run and in later ones."""
    Clock(0.02, FLAT, monkeypatch)
    target = tiny_target()
    found = probed(target)
    first = found.fixed
    assert first.seconds == found.profile.seconds
    play(found, STEEP, 0.02, [1, 2, 4, 8, 16])
    keep_costs(target.info, found)
    assert found.fixed.seconds == first.seconds != found.profile.seconds
    assert known_costs(target).fixed.seconds == first.seconds


def test_what_was_measured_is_never_refined_or_replaced() -> None:
    measured = CostProfile((1, 2), (16,), ((1.0, 2.0),))
    static, refined = LiveCosts(measured), LiveCosts(estimate_costs(INFO, 512))
    for found in (static, refined):
        play(found, FLAT, 0.5, [1, 2])
    assert static.profile == static.fixed == measured
    save_profile(INFO, measured)
    keep_costs(INFO, refined)  # `draftwood tune` ran meanwhile
    assert load_profile(INFO) == measured


def test_few_passes_are_not_stored() -> None:
    found = LiveCosts(estimate_costs(INFO, 512))
    play(found, FLAT, 0.5, [1], rounds=live.MIN_READINGS - 1)
    keep_costs(INFO, found)
    assert load_profile(INFO) is None


def test_a_request_measures_nothing_and_leaves_its_curve_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(costs, "measure_costs", never)
    target = tiny_target()
    with LLM.from_target(target, ByteTokenizer(), drafter="pld", budget="auto") as llm:
        assert llm.budget > 1
        first = load_profile(target.info)
        llm.generate("ab" * 20, SamplingParams(max_tokens=100, ignore_eos=True))
    stored = load_profile(target.info)
    assert first is not None
    assert stored is not None
    assert stored.first == first.first
    assert stored.seconds != first.seconds


def test_a_measurement_replaces_an_estimate() -> None:
    target = tiny_target()
    probed(target)
    costs.require_measured(target)
    stored = load_profile(target.info)
    assert stored is not None
    assert stored.first is None
    measured = measure_costs(target)
    assert measured is not None
    assert measured.first is None


def test_sizes_that_are_not_ready_cost_what_the_next_ready_one_does() -> None:
    costs = LiveCosts(CostProfile((1, 101), (16,), ((1.0, 11.0),)))
    plain = costs.seconds(100, 16)
    ready = costs.seconds(100, 16, (4, 16, 48))
    assert [ready[n - 1] for n in (1, 4, 5, 16, 17, 48)] == [plain[n - 1] for n in (4, 4, 16, 16, 48, 48)]
    assert ready[48:] == plain[48:]  # beyond the last one nothing is known
    assert costs.seconds(100, 16, (4, 16, 48)) is ready


def test_costs_of_a_busy_machine_are_not_believed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By such a curve no guess would pay, and without guesses nothing would correct it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    usual = estimate_costs(INFO, 512)
    busy = tuple(
        tuple(seconds * (1.0 if size == 1 else 30.0) for size, seconds in zip(usual.sizes, row, strict=True))
        for row in usual.seconds
    )
    save_profile(INFO, replace(usual, seconds=busy, first=busy))
    target = tiny_target()
    monkeypatch.setattr(target, "info", INFO)
    relative, normal = known_costs(target).profile.relative(), usual.relative()
    assert relative[0] == 1.0
    assert all(own <= 2.0 * other for own, other in zip(relative, normal, strict=True))
    save_profile(INFO, replace(usual, seconds=busy, first=None))
    assert known_costs(target).profile.seconds == busy  # measured by `draftwood tune`


@pytest.mark.parametrize("factor", [0.85, 1.9])
def test_a_stored_curve_is_checked(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed of the machine is taken over at once, what sizes cost beside each other half of the way."""
    target, usual = tiny_target(), estimate_costs(INFO, 512)
    true = dict(zip(usual.sizes, usual.seconds[0], strict=True))
    stored = tuple(
        tuple(factor * seconds if size > 6 else seconds for size, seconds in zip(usual.sizes, row, strict=True))
        for row in usual.seconds
    )
    save_profile(INFO, replace(usual, seconds=stored, first=stored))
    clock = Clock(5.0, [true[size] / true[1] for size in SIZES], monkeypatch)
    found = known_costs(target)
    monkeypatch.setattr(live, "CHECK_SECONDS", 1000.0)
    probe_costs(target, found, found.largest)
    assert set(clock.passes) == set(live.CHECKED)
    relative, before = found.profile.of(16, 0) / found.profile.of(16, 0)[0], known_costs(target).profile.of(16, 0)
    for size in (8, 16):
        wanted = true[size] / true[1] * factor**0.5
        assert relative[size - 1] == pytest.approx(wanted, rel=0.1)
        assert abs(relative[size - 1] - before[size - 1] / before[0]) > 0.1
    assert found.profile.of(16, 0)[0] == pytest.approx(5.0, rel=0.4)
    assert found.fixed.seconds == stored  # a seed gives the same text as before


def test_a_wrong_stored_curve_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say one of a machine of the same name with a matrix unit: by it, large trees would cost hardly anything."""
    rng, target, usual = random.Random(1), tiny_target(), estimate_costs(INFO, 512)
    true = dict(zip(usual.sizes, usual.relative(), strict=True))
    relative = [true[size] for size in SIZES]
    clock = Clock(0.01, relative, monkeypatch, lambda: rng.uniform(1.0, 1.5))
    flat = tuple(tuple(0.01 * (1.0 + 0.002 * size) for size in usual.sizes) for _ in usual.seconds)
    save_profile(INFO, replace(usual, seconds=flat, first=flat))
    for _ in range(3):
        found = probed(target)
        for _ in range(100):
            size = rng.choice((1, 3, 8, 16))
            found.note(size, clock.run(size) / float(found.profile.of(16, 16)[size - 1]))
        keep_costs(INFO, found)
    line = found.profile.of(16, 16)
    for size in (3, 8, 16):
        assert line[size - 1] / line[0] == pytest.approx(true[size], rel=0.1)


def test_sizes_that_are_slower_than_larger_ones_disturb_no_others() -> None:
    rng, usual = random.Random(1), estimate_costs(INFO, 512)
    true = dict(zip(usual.sizes, usual.relative(), strict=True))
    slower = true | {2: true[4] * 1.2, 12: true[16] * 1.12}
    found, speed = LiveCosts(usual), 1.0
    for number in range(8000):
        if number % 400 == 0:
            speed = rng.uniform(1.0, 1.5)
        size = rng.choice((1, 2, 4, 12, 16))
        seconds = usual.seconds[0][0] * speed * rng.uniform(0.9, 1.1) * slower[size]
        found.note(size, seconds / float(found.profile.of(16, 16)[size - 1]))
    line = found.profile.of(64, 16)
    for size in (32, 64):
        assert line[size - 1] / line[0] == pytest.approx(true[size], rel=0.1)
    for size in (2, 4, 12, 16):
        assert line[size - 1] / line[0] == pytest.approx(slower[size], rel=0.15)


@pytest.mark.parametrize("max_batch", [1, 32])
def test_passes_of_batches_are_timed_where_there_are_batches(max_batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that is not prepared would be compiled first, which takes a thousand times as long."""
    target = tiny_target(cache_tokens=4096)
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 512)
    target.info = replace(target.info, device=torch.device("cuda"), pass_sizes=sizes, context_length=4096)
    prepared, timed = list[int](), set[int]()

    def time_pass(_: object, __: int, size: int) -> float:
        timed.add(size)
        return 1e-3 * (1.0 + 0.004 * size if size <= prepared[0] else 1000.0)

    monkeypatch.setattr(live, "time_pass", time_pass)
    monkeypatch.setattr(costs, "machine", lambda _: "a GPU")
    monkeypatch.setattr(NativeTarget, "prepare", lambda _self, largest, _progress: prepared.append(largest))
    for _ in range(2):  # the second engine starts from the stored curve
        prepared.clear(), timed.clear()
        with LLM.from_target(target, ByteTokenizer(), drafter="pld", budget="auto", max_batch=max_batch) as llm:
            assert llm.budget == 128  # of a single tree
            line = llm.engine._costs.seconds(512, 0)  # type: ignore[union-attr]
        assert prepared == [128 if max_batch == 1 else 512]
        assert timed == {size for size in sizes if size <= prepared[0]}
        assert line[127] == pytest.approx(1e-3 * (1.0 + 0.004 * 128), rel=0.02)
        if max_batch > 1:
            assert line[511] == pytest.approx(1e-3 * (1.0 + 0.004 * 512), rel=0.02)
