"""Intervals match all possible resamples and simulated truths, and do not depend on irrelevant changes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.bench.figures.bootstrap import (
    Array,
    cluster_table,
    group_timings,
    interval,
    mean_of_strata,
    paired_speedup,
    quotient,
    ratio_of_sums,
    resample_medians,
    resample_sums,
    resample_timed_rows,
)
from draftwood.bench.figures.summary import Interval

FEW = 200  # resamples, where their number is not the point


def table(*rows: tuple[float, ...]) -> Array:
    return np.array(rows, dtype=np.float64)


def every_resample(data: Array) -> Array:
    """[C ** (C - 1), K]: the sums of every resample of C - 1 rows."""
    drawn = np.array(list(itertools.product(range(len(data)), repeat=len(data) - 1)))
    sums: Array = data[drawn].sum(axis=1)
    return sums


def test_a_constant_ratio_has_no_width() -> None:
    draws = ratio_of_sums(table((6, 3), (10, 5), (2, 1), (32, 16)))
    assert interval(draws) == Interval(2.0, 2.0, 2.0)


def test_one_cluster_has_no_width() -> None:
    assert interval(ratio_of_sums(table((7, 2)))) == Interval(3.5, 3.5, 3.5)
    assert interval(paired_speedup(table((7, 2, 7, 4)))) == Interval(2.0, 2.0, 2.0)


def test_value_is_ratio_of_sums_not_mean_of_ratios() -> None:
    assert ratio_of_sums(table((10, 1), (10, 9)))[0] == 2.0
    # 30 tokens in 3 seconds against 30 in 10; request by request it would be 4 and 2.5.
    assert paired_speedup(table((10, 1, 10, 4), (20, 2, 20, 6)))[0] == pytest.approx(10 / 3)


def test_two_clusters_against_both_resamples() -> None:
    # (1, 1): 1; (3, 1): 3. One of the two is drawn.
    draws = ratio_of_sums(table((1, 1), (3, 1)), resamples=20_000)
    found, times = np.unique(draws[1:], return_counts=True)
    assert found.tolist() == [1.0, 3.0]
    assert times / 20_000 == pytest.approx([0.5, 0.5], abs=0.015)
    assert interval(draws) == Interval(2.0, 1.0, 3.0)


@pytest.mark.parametrize(
    "data",
    [
        table((4, 1), (6, 2), (9, 2), (1, 1)),
        table((1, 1), (1, 1), (1, 1), (1, 1), (9, 1)),  # a two-point distribution: 9 is drawn k times of 4
        table((5, 1), (5, 2), (5, 3), (5, 4), (5, 5)),
    ],
)
def test_quantiles_against_enumeration(data: Array) -> None:
    sums = every_resample(data)
    exact = np.sort(sums[:, 0] / sums[:, 1])
    draws = ratio_of_sums(data, resamples=20_000)
    found = interval(draws)
    assert found is not None
    # Each end lies between exact quantiles slightly outside and slightly inside of it.
    assert np.quantile(exact, 0.02) <= found.low <= np.quantile(exact, 0.03)
    assert np.quantile(exact, 0.97) <= found.high <= np.quantile(exact, 0.98)
    assert draws[1:].mean() == pytest.approx(exact.mean(), rel=0.02)


def test_pairs_are_resampled_together() -> None:
    """Prompts differ tenfold in speed, equally for both methods: the speed-up is certain, the speeds are not."""
    data = table(*((10.0, t, 10.0, 2 * t) for t in (1.0, 2.0, 4.0, 10.0)))
    assert interval(paired_speedup(data)) == pytest.approx((2.0, 2.0, 2.0))
    alone = interval(ratio_of_sums(data[:, :2]))
    assert alone is not None
    assert alone.high > 1.5 * alone.low


def test_strata_have_equal_weight_and_are_resampled_independently() -> None:
    small, large = table((1, 1), (3, 1)), table(*[(4, 1)] * 6)
    mean = mean_of_strata([ratio_of_sums(small, "small"), ratio_of_sums(large, "large")])
    assert interval(mean) == Interval(3.0, 2.5, 3.5)  # (2 + 4) / 2, not 28 / 8
    # Of two strata like small, both are at their lowest in 1/4 of the resamples, not in 1/2.
    draws = [ratio_of_sums(small, name, resamples=20_000) for name in ("one", "other")]
    assert (mean_of_strata(draws)[1:] == 1.0).mean() == pytest.approx(1 / 4, abs=0.01)


def test_medians_by_hand() -> None:
    draws = resample_medians(table((1, 10), (2, 20), (90, 900)))
    assert draws[0].tolist() == [2.0, 20.0]
    assert set(draws[1:, 0]) == {1.0, 1.5, 2.0, 45.5, 46.0, 90.0}  # of the two drawn values
    assert (draws[:, 1] == 10 * draws[:, 0]).all()
    # The median is the smallest where that was drawn twice: 1 of 9.
    many = resample_medians(table((1,), (2,), (90,)), resamples=20_000)
    assert (many[1:, 0] == 1.0).mean() == pytest.approx(1 / 9, abs=0.015)


def test_division_by_zero_gives_no_value() -> None:
    assert interval(ratio_of_sums(table((1, 0), (2, 0)))) is None
    assert interval(paired_speedup(table((4, 2, 0, 1)))) is None
    # Here only resamples without the second row divide by zero.
    found = interval(ratio_of_sums(table((1, 0), (2, 1))))
    assert found == Interval(3.0, 2.0, 3.0)
    assert interval(np.array([1.0, np.nan])) == Interval(1.0, 1.0, 1.0)


def test_interval_contains_its_value() -> None:
    assert interval(np.array([5.0, 1.0, 1.0, 2.0])) == pytest.approx((5.0, 1.0, 5.0))


def test_clusters_are_summed() -> None:
    rows = [("b", (1.0, 2.0)), ("a", (3.0, 4.0)), ("b", (5.0, 6.0))]
    found = cluster_table(rows)
    assert found is not None
    assert sorted(found.tolist()) == [[3.0, 4.0], [6.0, 8.0]]
    assert cluster_table([]) is None


def test_requests_of_one_prompt_form_one_cluster() -> None:
    """Ten repeats of two prompts are as uncertain as the two prompts."""
    twice = cluster_table([("slow", (1.0, 1.0)), ("fast", (3.0, 1.0))])
    often = cluster_table([("slow", (1.0, 1.0)), ("fast", (3.0, 1.0))] * 10)
    assert twice is not None
    assert often is not None
    assert interval(ratio_of_sums(often)) == interval(ratio_of_sums(twice))


def test_many_clusters_are_resampled_in_blocks() -> None:
    data = np.ones((30_000, 2))
    sums = resample_sums(data, resamples=50)
    assert sums.shape == (51, 2)
    assert (sums[0] == 30_000.0).all()
    assert (sums[1:] == 29_999.0).all()


def test_intervals_cover_the_truth() -> None:
    """200 runs of 20 prompts each. The true rate is 2 tokens per second, twice that of plain decoding."""
    random = np.random.default_rng(7)
    covered = {"ratio": 0, "speedup": 0}
    for _ in range(200):
        tokens = random.integers(20, 200, size=20).astype(np.float64)
        seconds = tokens / 2.0 * random.gamma(8.0, 1 / 8.0, size=20)  # on average a token takes half a second
        plain = tokens * random.gamma(8.0, 1 / 8.0, size=20)  # and one of plain decoding a whole one
        data = np.stack([tokens, seconds, tokens, plain], axis=1)
        for name, draws in (("ratio", ratio_of_sums(data[:, :2])), ("speedup", paired_speedup(data))):
            found = interval(draws)
            assert found is not None
            covered[name] += found.low <= 2.0 <= found.high
    assert all(176 <= times <= 198 for times in covered.values()), covered


positive = st.floats(0.01, 1000.0)
pairs = st.lists(st.tuples(positive, positive, positive, positive), min_size=1, max_size=12)


@settings(max_examples=60)
@given(pairs)
def test_a_value_lies_in_its_interval(rows: list[tuple[float, ...]]) -> None:
    data = table(*rows)
    rate, speedup = (interval(draws) for draws in (ratio_of_sums(data[:, :2]), paired_speedup(data)))
    assert rate is not None
    assert speedup is not None
    assert 0.0 < rate.low <= rate.value <= rate.high
    assert 0.0 < speedup.low <= speedup.value <= speedup.high
    slowest, fastest = np.quantile(data[:, 0] / data[:, 1], [0.0, 1.0])
    assert slowest * (1 - 1e-9) <= rate.low <= rate.high <= fastest * (1 + 1e-9)


@settings(max_examples=60)
@given(pairs, st.sampled_from([0.125, 0.5, 4.0, 32.0]))
def test_slower_machine_changes_speeds_but_not_speedups(rows: list[tuple[float, ...]], slower: float) -> None:
    data, slow = table(*rows), table(*rows)
    slow[:, [1, 3]] *= slower  # powers of two avoid rounding
    assert (paired_speedup(slow, resamples=FEW) == paired_speedup(data, resamples=FEW)).all()
    fast = ratio_of_sums(data[:, :2], resamples=FEW)
    assert (ratio_of_sums(slow[:, :2], resamples=FEW) == fast / slower).all()


@settings(max_examples=60)
@given(pairs, st.randoms(use_true_random=False))
def test_order_of_prompts_does_not_matter(rows: list[tuple[float, ...]], random: object) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert (paired_speedup(table(*shuffled), resamples=FEW) == paired_speedup(table(*rows), resamples=FEW)).all()


def test_draws_are_deterministic_and_differ_between_tasks() -> None:
    data = table((1, 1), (3, 1), (4, 2), (9, 2))
    assert (ratio_of_sums(data, "gsm8k") == ratio_of_sums(data, "gsm8k")).all()
    assert (ratio_of_sums(data, "gsm8k") != ratio_of_sums(data, "mbpp")).any()


def test_quotients_of_draws_are_draws_of_quotients() -> None:
    sums = resample_sums(table((4, 1), (6, 2), (9, 2)))
    assert (quotient(sums[:, 0], sums[:, 1]) == ratio_of_sums(table((4, 1), (6, 2), (9, 2)))).all()


def test_strata_with_one_cluster_are_resampled_across_strata() -> None:
    alone = [ratio_of_sums(table((tokens, 1.0)), name) for name, tokens in (("a", 1.0), ("b", 2.0), ("c", 6.0))]
    many = [ratio_of_sums(table((t, 1.0)), name, resamples=20_000) for name, t in (("a", 1.0), ("b", 2.0), ("c", 6.0))]
    draws = mean_of_strata(many)
    assert draws[0] == 3.0
    assert (draws[1:] == 1.0).mean() == pytest.approx(1 / 9, abs=0.01)  # twice the lowest
    assert interval(mean_of_strata(alone)) == Interval(3.0, 1.0, 6.0)
    assert interval(mean_of_strata(alone[:1])) == Interval(1.0, 1.0, 1.0)  # nothing to draw from
    alike = [ratio_of_sums(table((2.0, 1.0)), name) for name in "ab"]
    assert interval(mean_of_strata(alike)) == Interval(2.0, 2.0, 2.0)


def test_variance_of_draws_matches_variance_of_mean() -> None:
    """The variance of a mean of n values is s^2 / n, where s^2 has the denominator n - 1."""
    values = [1.0, 2.0, 4.0, 9.0]
    draws = ratio_of_sums(table(*((value, 1.0) for value in values)), resamples=50_000)
    assert draws[1:].var() == pytest.approx(np.var(values, ddof=1) / 4, rel=0.03)
    single = [ratio_of_sums(table((value, 1.0)), str(value), resamples=50_000) for value in values]
    assert mean_of_strata(single)[1:].var() == pytest.approx(np.var(values, ddof=1) / 4, rel=0.03)


# --- times ------------------------------------------------------------------------------------------------------------


def timed(prompts: int, repeats: int, noise: float, seed: int = 0) -> list[tuple[str, tuple[float, ...]]]:
    """Requests of equal prompts whose times alone vary: tokens and seconds."""
    draw = np.random.default_rng(seed)
    return [(str(p), (10.0, float(draw.lognormal(0.0, noise)))) for p in range(prompts) for _ in range(repeats)]


def test_repeats_of_one_prompt_have_an_interval() -> None:
    rows = timed(1, 8, 0.3)
    found = interval(ratio_of_sums(group_timings(rows), "a"))  # type: ignore[arg-type]
    assert found is not None
    assert found.low < 0.95 * found.value < found.value < 1.05 * found.value < found.high
    single = interval(ratio_of_sums(group_timings(rows[:1]), "a"))  # type: ignore[arg-type]
    assert single is not None
    assert single.low == single.high == single.value


def test_intervals_over_repeats_cover_the_truth() -> None:
    """Of 200 simulated benchmarks of three prompts, about 95% of the intervals must contain the true rate."""
    covered = 0
    for seed in range(200):
        found = interval(resample_quotient(timed(3, 6, 0.3, seed)))
        assert found is not None
        covered += found.low <= 10.0 / np.exp(0.3**2 / 2) <= found.high
    assert covered >= 176


def resample_quotient(rows: list[tuple[str, tuple[float, ...]]]) -> Array:
    sums = resample_timed_rows(rows, "a")
    return quotient(sums[:, 0], sums[:, 1])


def test_one_request_per_prompt_is_resampled_as_before_and_order_does_not_matter() -> None:
    rows = timed(9, 1, 0.3)
    assert interval(resample_quotient(rows)) == interval(resample_quotient(rows[::-1]))
    many = timed(5, 3, 0.3)
    assert np.array_equal(resample_quotient(many), resample_quotient(many[::-1]))
