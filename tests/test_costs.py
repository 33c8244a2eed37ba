"""What passes cost: lines through what was measured, the file that keeps it, and the measuring itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood import LLM, SamplingParams
from draftwood.engine import costs
from draftwood.engine.costs import (
    LARGEST_TREE,
    SIZES,
    CostProfile,
    fitted,
    known_costs,
    load_profile,
    measure_costs,
    never_falling,
    profile_path,
)
from draftwood.engine.costs import save_profile as save
from draftwood.target.native.target import NativeTarget
from draftwood.target.tiny import TINY_CONFIG, ByteTokenizer, tiny_target

INFO = tiny_target().info
PROFILE = CostProfile((1, 2, 4), (10, 20), ((1.0, 2.0, 3.0), (2.0, 4.0, 8.0)))
STEPPED = CostProfile((1, 4, 8), (10, 20), ((1.0, 2.0, 3.0), (2.0, 4.0, 8.0)), stepped=True)
PASS_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    """An empty cache for every test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "cache_home", lambda: tmp_path)
        patch.setattr(costs, "WARM_UP_SECONDS", 0.0)
        yield tmp_path


# -- lines -----------------------------------------------------------------------------------------------------------


def test_costs_are_linear_between_and_beyond_sizes() -> None:
    assert PROFILE.of(6, 10).tolist() == [1.0, 2.0, 2.5, 3.0, 3.5, 4.0]
    assert PROFILE.of(2, 20).tolist() == [2.0, 4.0]


def test_costs_are_linear_between_and_beyond_contexts() -> None:
    assert PROFILE.of(4, 15).tolist() == [1.5, 3.0, 4.25, 5.5]
    assert PROFILE.of(2, 40).tolist() == [4.0, 8.0]
    assert PROFILE.of(2, 5).tolist() == [0.5, 1.0]
    three = CostProfile((1,), (0, 10, 20), ((1.0,), (2.0,), (6.0,)))
    assert [float(three.of(1, context)[0]) for context in (5, 10, 15, 30)] == [1.5, 2.0, 4.0, 10.0]


def test_one_context_and_one_size_stand_for_all() -> None:
    one = CostProfile((1, 3), (16,), ((1.0, 2.0),))
    assert one.of(3, 0).tolist() == one.of(3, 5000).tolist() == [1.0, 1.5, 2.0]
    assert CostProfile((1,), (16,), ((2.0,),)).of(3, 99).tolist() == [2.0, 2.0, 2.0]
    assert one.largest == 3
    assert one.relative() == [1.0, 2.0]
    assert PROFILE.relative(1) == [1.0, 2.0, 4.0]


def test_steps_cost_what_the_next_size_does_and_in_proportion_beyond() -> None:
    assert STEPPED.of(12, 10).tolist() == [1.0, *[2.0] * 3, *[3.0] * 4, 3.375, 3.75, 4.125, 4.5]
    assert STEPPED.of(5, 15).tolist() == [1.5, 3.0, 3.0, 3.0, 5.5]
    assert CostProfile((1,), (16,), ((2.0,),), stepped=True).of(3, 99).tolist() == [2.0, 4.0, 6.0]


def test_passes_may_be_larger_than_trees() -> None:
    wide = CostProfile((1, 64, 128, 256), (16,), ((1.0, 1.1, 1.2, 1.9),), stepped=True)
    assert wide.largest == 128
    assert wide.of(256, 16)[-1] == 1.9
    assert CostProfile((1, 64, 256), (16,), ((1.0, 1.1, 1.9),), stepped=True).largest == 64


def rows_of(num_sizes: int) -> st.SearchStrategy[tuple[float, ...]]:
    seconds = st.lists(st.floats(1e-5, 10.0), min_size=num_sizes, max_size=num_sizes)
    return seconds.map(lambda row: tuple(sorted(row)))


@st.composite
def profiles(draw: st.DrawFn) -> CostProfile:
    sizes = (1, *sorted(draw(st.sets(st.integers(2, 64), max_size=5))))
    contexts = tuple(sorted(draw(st.sets(st.integers(0, 2048), min_size=1, max_size=3))))
    return CostProfile(sizes, contexts, tuple(draw(rows_of(len(sizes))) for _ in contexts), draw(st.booleans()))


@given(profiles(), st.integers(1, 150), st.integers(0, 100_000))
def test_more_positions_never_cost_less_and_nothing_is_free(profile: CostProfile, size: int, context: int) -> None:
    """Also where noise made the longer context the quicker one, and the line through both goes down."""
    line = profile.of(size, context)
    assert line.shape == (size,)
    assert line[0] > 0.0
    assert (np.diff(line) >= 0.0).all()


# -- the fit ---------------------------------------------------------------------------------------------------------

VALUES = st.lists(st.floats(0.1, 10.0), min_size=1, max_size=9)


@pytest.mark.parametrize(
    ("readings", "fit"),
    [
        ([1.0, 1.0, 3.0, 1.1, 1.2, 1.2], [1.0, 1.0, 1.1, 1.1, 1.2, 1.2]),  # one too slow
        ([3.0, 1.0, 1.0, 1.2], [1.0, 1.0, 1.0, 1.2]),  # the first one too slow
        ([1.0, 1.0, 0.2, 1.0, 1.2], [1.0, 1.0, 1.0, 1.0, 1.2]),  # one too quick
        ([1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]),  # a step
    ],
)
def test_single_readings_that_are_off_move_no_others(readings: list[float], fit: list[float]) -> None:
    assert never_falling(readings) == fit


@given(VALUES)
def test_a_fit_ascends_and_leaves_what_ascends_alone(values: list[float]) -> None:
    fit = never_falling(values)
    assert fit == sorted(fit)
    assert set(fit) <= set(values)
    assert never_falling(sorted(values)) == sorted(values)


@given(VALUES)
def test_no_ascending_values_are_nearer(values: list[float]) -> None:
    """Absolute distances: the best of all is found by a table over the values that may be taken."""

    def distance(fit: list[float]) -> float:
        return sum(abs(a - b) for a, b in zip(values, fit, strict=True))

    levels = sorted(set(values))
    best = [0.0] * len(levels)  # of what came before, if it ends at that level or below
    for value in values:
        ending = [before + abs(value - level) for before, level in zip(best, levels, strict=True)]
        best = np.minimum.accumulate(ending).tolist()
    assert distance(never_falling(values)) == pytest.approx(best[-1])


@given(st.integers(1, 3).flatmap(lambda c: st.lists(st.tuples(*[st.floats(0.1, 9.0)] * 6), min_size=c, max_size=c)))
def test_fitted_rows_rise_along_sizes_and_contexts(rows: list[tuple[float, ...]]) -> None:
    fit = np.array(fitted(rows))
    assert fit.shape == (len(rows), 6)
    assert (np.diff(fit, axis=0) >= 0.0).all()
    assert (np.diff(fit, axis=1) >= 0.0).all()


# -- the file --------------------------------------------------------------------------------------------------------


@given(profiles())
def test_a_profile_survives_its_file(profile: CostProfile) -> None:
    info = replace(INFO, pass_sizes=profile.sizes) if profile.stepped else INFO
    save(info, profile)
    assert load_profile(info) == profile


def test_passes_of_other_sizes_are_timed_anew() -> None:
    """Whether a profile is of steps, and of which, is for the target to say."""
    for sizes, known in [
        ((1, 4, 8), True),
        ((4, 8, 16), True),
        ((1, 4, 16), False),
        ((1, 4, 6, 8), False),
        ((), False),
    ]:
        save(INFO, STEPPED)
        assert (load_profile(replace(INFO, pass_sizes=sizes)) is not None) == known
    save(INFO, PROFILE)
    assert load_profile(replace(INFO, pass_sizes=(1, 4, 8))) is None


def test_nothing_was_measured_yet() -> None:
    assert load_profile(INFO) is None


@pytest.mark.parametrize(
    "change",
    [
        {"format": "something-else"},
        {"version": 1},
        {"version": 3},
        {"stepped": 0},
        {"stepped": None},
        {"sizes": [2, 4, 8]},
        {"sizes": [1, 4, 2]},
        {"sizes": [1, 2, 2]},
        {"sizes": [1, 2.0, 4]},
        {"sizes": [True, 2, 4]},
        {"sizes": ["1", "2", "4"]},
        {"sizes": 3},
        {"sizes": []},
        {"contexts": []},
        {"contexts": [20, 10]},
        {"contexts": [10]},
        {"contexts": [[10], [20]]},
        {"contexts": None},
        {"seconds": []},
        {"seconds": [[1.0, 2.0, 3.0], [1.0, 2.0]]},
        {"seconds": [[1.0, 2.0, 3.0], [0.0, 2.0, 3.0]]},
        {"seconds": [[1.0, 2.0, 3.0], [-1.0, 2.0, 3.0]]},
        {"seconds": [[1.0, 3.0, 2.0], [1.0, 2.0, 3.0]]},
        {"seconds": [[1.0, 2.0, math.nan], [1.0, 2.0, 3.0]]},
        {"seconds": [[1.0, 2.0, math.inf], [1.0, 2.0, 3.0]]},
        {"seconds": [["1", "2", "3"], ["1", "2", "3"]]},
        {"seconds": [None, None]},
        {"seconds": "abc"},
    ],
)
def test_unsound_files_count_for_nothing(change: dict[str, Any]) -> None:
    path = save(INFO, PROFILE)
    assert load_profile(INFO) == PROFILE
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    assert load_profile(INFO) is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"3", b"{}", b"\xff\xfe", b'{"format": "draftwood-costs"}']
)
def test_damaged_files_count_for_nothing(content: bytes) -> None:
    save(INFO, PROFILE).write_bytes(content)
    assert load_profile(INFO) is None


def test_files_are_kept_apart_by_model_format_decoder_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [
        replace(INFO, name="other"),
        replace(INFO, architecture="other"),
        replace(INFO, num_parameters=INFO.num_parameters + 1),
        replace(INFO, dtype=torch.bfloat16),
        replace(INFO, backend="transformers"),
    ]
    paths = {profile_path(INFO), *map(profile_path, others)}
    assert len(paths) == 1 + len(others)
    monkeypatch.setattr(costs, "processor", lambda: "another processor")
    assert profile_path(INFO) not in paths
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert profile_path(INFO) not in paths


# -- measuring -------------------------------------------------------------------------------------------------------


def test_what_is_known_is_not_measured_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    measured = known_costs(target)
    assert measured is not None
    assert load_profile(target.info) == measured

    def never(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(costs, "measure_costs", never)
    assert known_costs(target) == measured


OLD = {"format": "draftwood-costs", "version": 1, "sizes": [1, 2], "contexts": [16], "seconds": [[1.0, 2.0]]}


@pytest.mark.parametrize("content", ["{}", '{"format": "draftwood-costs", "version": 2}', "damaged", json.dumps(OLD)])
def test_a_file_that_cannot_be_used_is_measured_anew_and_replaced(content: str) -> None:
    target = tiny_target()
    path = profile_path(target.info)
    path.parent.mkdir()
    path.write_text(content, encoding="utf-8")
    measured = known_costs(target)
    assert measured is not None
    assert load_profile(target.info) == measured


def test_a_cache_that_cannot_be_written_does_not_fail_a_run(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = cache / "file"
    blocked.write_text("no folder", encoding="utf-8")
    monkeypatch.setattr(costs, "cache_home", lambda: blocked)
    assert known_costs(tiny_target()) is not None
    llm = LLM.from_target(tiny_target(), ByteTokenizer(), drafter="pld", budget="auto")
    assert len(llm.generate("abab", SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_measured_costs_never_fall_and_leave_nothing_behind(backend: str) -> None:
    target = tiny_target(backend=backend)
    profile = measure_costs(target, (16, 64, 200))
    assert profile is not None
    assert profile.contexts == (16, 64, 200)
    assert profile.sizes == SIZES[: len(profile.sizes)]
    for row in profile.seconds:
        assert list(row) == sorted(row)
        assert len(row) == len(profile.sizes)
        assert row[0] > 0.0
    for shorter, longer in zip(profile.seconds, profile.seconds[1:], strict=False):
        assert all(a <= b for a, b in zip(shorter, longer, strict=True))
    assert target.can_open(target.num_slots)


class FakeClock:
    """Passes take as long as ``seconds`` says of their context and size."""

    def __init__(self, target: NativeTarget, seconds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(costs, "_forward", lambda _, sequence, size: seconds(target.length(sequence), size))


def test_it_is_measured_behind_as_much_context_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    FakeClock(target, lambda context, size: 1.0 + 0.001 * context * size, monkeypatch)
    profile = measure_costs(target, (10, 300))
    assert profile is not None
    for context, row in zip(profile.contexts, profile.seconds, strict=True):
        assert row == pytest.approx([1.0 + 0.001 * context * size for size in profile.sizes])
    assert profile.of(20, 1000) == pytest.approx([1.0 + size for size in range(1, 21)])


def test_measuring_ends_where_passes_cost_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    FakeClock(target, lambda context, size: float(size if context < 100 else size**1.5), monkeypatch)
    profile = measure_costs(target, (16, 200))
    assert profile is not None
    assert profile.sizes == (1, 2, 3, 4, 6)  # 6 ** 1.5 is the first above 8 at the longer context
    assert [len(row) for row in profile.seconds] == [5, 5]


def test_dips_are_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    FakeClock(target, lambda context, size: 1.0 if size == 4 and context < 100 else 2.0, monkeypatch)
    profile = measure_costs(target, (16, 200))
    assert profile is not None
    assert set(profile.seconds[0]) == set(profile.seconds[1]) == {2.0}


def test_a_longer_context_that_seems_quicker_is_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    FakeClock(target, lambda context, size: 2.0 if context < 100 else 1.0, monkeypatch)
    profile = measure_costs(target, (16, 200))
    assert profile is not None
    assert profile.seconds[0] == profile.seconds[1]


def stepping_target(**options: Any) -> NativeTarget:
    """Says of its passes that they have certain sizes."""
    target = tiny_target(replace(TINY_CONFIG, context_length=4096), **options)
    target.info = replace(target.info, pass_sizes=PASS_SIZES)
    return target


def next_size(size: int) -> int:
    return min(pass_size for pass_size in PASS_SIZES if pass_size >= size)


def test_passes_of_a_target_with_sizes_are_timed_for_batches_too(monkeypatch: pytest.MonkeyPatch) -> None:
    target = stepping_target()
    asked: list[int] = []

    def seconds(context: int, size: int) -> float:
        asked.append(size)
        return 1.0 + 0.002 * size + 0.0001 * context

    FakeClock(target, seconds, monkeypatch)
    profile = measure_costs(target)
    assert profile is not None
    assert profile.stepped
    assert profile.sizes == PASS_SIZES[:-1]  # up to 512
    assert set(asked) == set(profile.sizes)
    assert profile.largest == LARGEST_TREE
    for context in (16, 512, 3000):
        line = profile.of(512, context)
        truth = [1.0 + 0.002 * next_size(size) + 0.0001 * context for size in range(1, 513)]
        assert line == pytest.approx(truth)


def test_a_gpu_is_timed_behind_a_longer_context(monkeypatch: pytest.MonkeyPatch) -> None:
    for cache_tokens, contexts in [(8192, (16, 2048)), (1500, (16, 1500 - 512)), (520, (16, 520 - 256))]:
        target = stepping_target(cache_tokens=cache_tokens)
        FakeClock(target, lambda context, size: 1.0, monkeypatch)
        target.info = replace(target.info, device=torch.device("cuda"))
        profile = measure_costs(target)
        assert profile is not None
        assert profile.contexts == contexts


def test_what_a_first_pass_prepares_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass of a size may compile and capture; that is neither its cost nor a reason to stop."""
    target = stepping_target()
    seen: set[int] = {1}

    def seconds(context: int, size: int) -> float:
        first = size not in seen
        seen.add(size)
        return 50.0 if first else 1.0

    FakeClock(target, seconds, monkeypatch)
    profile = measure_costs(target)
    assert profile is not None
    assert profile.sizes == PASS_SIZES[:-1]
    assert {seconds for row in profile.seconds for seconds in row} == {1.0}


def sizes_asked(target: NativeTarget, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills up as passes are timed, all of which take a second."""
    asked: list[int] = []

    def seconds(context: int, size: int) -> float:
        asked.append(size)
        return 1.0

    FakeClock(target, seconds, monkeypatch)
    return asked


def test_sizes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disturbance that lasts for a while falls on several sizes, not on all readings of one."""
    target = stepping_target()
    asked = sizes_asked(target, monkeypatch)
    assert measure_costs(target, (16,)) is not None
    timed = list(PASS_SIZES[:-1])
    assert asked == timed * (len(asked) // len(timed))
    assert costs.MIN_ROUNDS <= len(asked) // len(timed) <= costs.MAX_ROUNDS


def test_rounds_end_when_they_took_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    target = stepping_target()
    asked = sizes_asked(target, monkeypatch)
    monkeypatch.setattr(costs, "ROUNDS_SECONDS", -1.0)
    assert measure_costs(target, (16,)) is not None
    assert len(asked) == costs.MIN_ROUNDS * len(PASS_SIZES[:-1])


CHANCES = {  # of the 1st, 2nd, ... node, best first
    "sure": [0.98**node for node in range(LARGEST_TREE)],
    "mixed": [1.0, *(0.75 / node**1.15 for node in range(1, LARGEST_TREE))],
    "doubtful": [1.0, *(0.3 / node**1.5 for node in range(1, LARGEST_TREE))],
}
CURVES = {  # what a pass takes beside a single position: large GPU, small one, one that steps
    "flat": ([1, 64, 128, 512], [1.0, 1.15, 1.35, 3.2]),
    "rising": ([1, 16, 64, 512], [1.0, 1.2, 2.2, 14.0]),
    "stairs": ([1, 32, 48, 64, 512], [1.0, 1.02, 1.6, 1.62, 4.0]),
}


@pytest.mark.parametrize("chances", CHANCES)
@pytest.mark.parametrize("curve", CURVES)
def test_noise_hardly_changes_the_size_that_pays_best(
    chances: str, curve: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every reading is some per cent off, many are far too slow, and no size is timed more than three times."""
    noise = np.random.default_rng(0)

    def truth(size: int) -> float:
        return float(np.interp(next_size(size), *CURVES[curve]))

    def reading(context: int, size: int) -> float:
        slow = noise.uniform(0.2, 2.0) if noise.random() < 0.3 else 0.0
        return truth(size) * (1.0 + noise.exponential(0.01) + slow)

    target = stepping_target()
    FakeClock(target, reading, monkeypatch)
    monkeypatch.setattr(costs, "MAX_ROUNDS", costs.MIN_ROUNDS)
    for _ in range(30):
        profile = measure_costs(target)
        assert profile is not None
        tokens = np.cumsum(CHANCES[chances])[: profile.largest]
        true_rates = tokens / [truth(size) for size in range(1, profile.largest + 1)]
        chosen = int(np.argmax(tokens / profile.of(profile.largest, 16)))
        assert true_rates[chosen] >= 0.95 * true_rates.max()


def test_progress_is_reported() -> None:
    told: list[tuple[str, int, int]] = []
    profile = measure_costs(tiny_target(), (4, 8), lambda *step: told.append(step))
    assert profile is not None
    done = [step[1] for step in told]
    assert done == sorted(done)
    assert done[:3] == [0, 1, 2]
    assert {step[2] for step in told} == {done[-1]} == {2 * len(SIZES)}
    assert {step[0] for step in told} == {costs.LABEL}


def test_a_pass_that_fails_leaves_no_sequence_open(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()

    def fail(*_: object) -> float:
        raise RuntimeError("no")

    monkeypatch.setattr(costs, "_forward", fail)
    with pytest.raises(RuntimeError):
        measure_costs(target)
    assert target.can_open(target.num_slots)


@pytest.mark.parametrize("length", [1, 2, 10, 20, 100])
def test_small_contexts_and_caches_limit_what_is_measured(length: int) -> None:
    for target in (tiny_target(replace(TINY_CONFIG, context_length=length)), tiny_target(cache_tokens=length)):
        profile = measure_costs(target)
        assert profile is not None
        assert profile.largest <= max(1, length // 2)
        assert profile.contexts[-1] + profile.largest <= length
        assert target.can_open(length)


def test_a_full_cache_is_measured_later() -> None:
    target = tiny_target(cache_tokens=64)
    llm = LLM.from_target(target, ByteTokenizer(), drafter="pld", budget="auto")
    held = target.open(30)
    assert llm.budget == 1
    assert llm.generate("abab", SamplingParams(max_tokens=8, ignore_eos=True))[0].stats.cycles == 8
    assert load_profile(target.info) is None
    target.close(held)
    assert llm.budget > 1
