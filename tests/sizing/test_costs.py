"""Costs of passes: interpolation between measurements, and the profile file."""

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

from draftwood.sizing import costs
from draftwood.sizing.costs import CostProfile, fitted, isotonic, load_profile, profile_path
from draftwood.sizing.costs import save_profile as save
from draftwood.targets.tiny import tiny_target

INFO = tiny_target().info
PROFILE = CostProfile((1, 2, 4), (10, 20), ((1.0, 2.0, 3.0), (2.0, 4.0, 8.0)))
STEPPED = CostProfile((1, 4, 8), (10, 20), ((1.0, 2.0, 3.0), (2.0, 4.0, 8.0)), stepped=True)


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


def test_single_context_and_size_apply_to_all() -> None:
    one = CostProfile((1, 3), (16,), ((1.0, 2.0),))
    assert one.of(3, 0).tolist() == one.of(3, 5000).tolist() == [1.0, 1.5, 2.0]
    assert CostProfile((1,), (16,), ((2.0,),)).of(3, 99).tolist() == [2.0, 2.0, 2.0]
    assert one.largest == 3
    assert one.relative() == [1.0, 2.0]
    assert PROFILE.relative(1) == [1.0, 2.0, 4.0]


def test_stepped_costs_use_next_size_and_scale_beyond() -> None:
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
    """Also if noise made the longer context faster, so that the extrapolated line falls."""
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
def test_outliers_do_not_change_other_readings(readings: list[float], fit: list[float]) -> None:
    assert isotonic(readings) == fit


@given(VALUES)
def test_fit_ascends_and_keeps_ascending_values(values: list[float]) -> None:
    fit = isotonic(values)
    assert fit == sorted(fit)
    assert set(fit) <= set(values)
    assert isotonic(sorted(values)) == sorted(values)


@given(VALUES)
def test_fit_is_the_nearest_ascending_sequence(values: list[float]) -> None:
    """Absolute distances: dynamic programming over the possible values finds the optimum."""

    def distance(fit: list[float]) -> float:
        return sum(abs(a - b) for a, b in zip(values, fit, strict=True))

    levels = sorted(set(values))
    best = [0.0] * len(levels)  # cost of the prefix if it ends at that level or below
    for value in values:
        ending = [before + abs(value - level) for before, level in zip(best, levels, strict=True)]
        best = np.minimum.accumulate(ending).tolist()
    assert distance(isotonic(values)) == pytest.approx(best[-1])


@given(st.integers(1, 3).flatmap(lambda c: st.lists(st.tuples(*[st.floats(0.1, 9.0)] * 6), min_size=c, max_size=c)))
def test_fitted_rows_rise_along_sizes_and_contexts(rows: list[tuple[float, ...]]) -> None:
    fit = np.array(fitted(rows))
    assert fit.shape == (len(rows), 6)
    assert (np.diff(fit, axis=0) >= 0.0).all()
    assert (np.diff(fit, axis=1) >= 0.0).all()


# -- the file --------------------------------------------------------------------------------------------------------


@given(profiles())
def test_profile_round_trips_through_file(profile: CostProfile) -> None:
    info = replace(INFO, pass_sizes=profile.sizes) if profile.stepped else INFO
    save(info, profile)
    assert load_profile(info) == profile


def test_passes_of_other_sizes_are_measured_again() -> None:
    """The target determines whether a profile is stepped, and its steps."""
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


def test_missing_profile_is_none() -> None:
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
def test_inconsistent_files_are_ignored(change: dict[str, Any]) -> None:
    path = save(INFO, PROFILE)
    assert load_profile(INFO) == PROFILE
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    assert load_profile(INFO) is None


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"3", b"{}", b"\xff\xfe", b'{"format": "draftwood-costs"}']
)
def test_damaged_files_are_ignored(content: bytes) -> None:
    save(INFO, PROFILE).write_bytes(content)
    assert load_profile(INFO) is None


def test_files_differ_by_model_format_decoder_and_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [
        replace(INFO, name="other"),
        replace(INFO, architecture="other"),
        replace(INFO, num_parameters=INFO.num_parameters + 1),
        replace(INFO, dtype=torch.bfloat16),
        replace(INFO, backend="transformers"),
        replace(INFO, is_exact=not INFO.is_exact),
    ]
    paths = {profile_path(INFO), *map(profile_path, others)}
    assert len(paths) == 1 + len(others)
    monkeypatch.setattr(costs, "processor", lambda: "another processor")
    assert profile_path(INFO) not in paths
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert profile_path(INFO) not in paths
