"""Formulas agree with simulation, optima with brute force."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftwood.errors import OptionError
from draftwood.tree.shapes import TreeShape, chain_tree, ranked_tree, recycling_tree, spine_tree
from draftwood.tree.theory import (
    MAX_SEQUOIA_BUDGET,
    best_isotropic,
    best_spine,
    chain_yield,
    expected_yield,
    geometric_acceptance,
    harmonic_widths,
    isotropic_yield,
    optimal_widths,
    sequoia,
    spine_yield,
    spine_yields,
    two_rate_tree,
)
from tests.tools.shapes import uniform_tree

RUNS = 40_000


def simulate(shape: TreeShape, rates: Sequence[float], seed: int) -> tuple[float, float]:
    """The acceptance process taken literally: every node is right or wrong on its own, and below an accepted node
    the first child that is right is accepted. Returns the mean of tau and its standard error."""
    right = np.random.default_rng(seed).random((RUNS, len(shape))) < np.asarray(rates)  # [runs, N]
    accepted = np.zeros_like(right)
    moved_on = np.zeros_like(right)
    accepted[:, 0] = True
    for node in range(1, len(shape)):
        parent = shape.parents[node]
        accepted[:, node] = accepted[:, parent] & ~moved_on[:, parent] & right[:, node]
        moved_on[:, parent] |= accepted[:, node]
    tau = accepted.sum(axis=1)  # the root stands for the bonus token
    return float(tau.mean()), float(tau.std() / np.sqrt(RUNS))


def two_rates(shape: TreeShape, p_s: float, p_t: float) -> list[float]:
    on_spine = [True]
    for parent, rank in zip(shape.parents[1:], shape.ranks[1:], strict=True):
        on_spine.append(on_spine[parent] and rank == 0)
    return [p_s if spine else p_t for spine in on_spine]


def by_rank(shape: TreeShape, acceptance: Sequence[float]) -> list[float]:
    """The probability that rank r is right if the ranks before it were wrong."""
    return [acceptance[rank] / (1 - sum(acceptance[:rank])) for rank in shape.ranks]


def greedy_widths(p_s: float, p_t: float, spine_length: int, num_branches: int) -> tuple[int, ...]:
    """The optimal widths branch by branch: each is added where ``p_s^i (1 - p_t)^w_i`` is largest, ties to the root."""
    widths = [0] * spine_length
    gains = [(-(p_s**i), i) for i in range(spine_length)]
    heapify(gains)
    for _ in range(num_branches if spine_length else 0):
        gain, i = gains[0]
        widths[i] += 1
        heapreplace(gains, (gain * (1 - p_t), i))
    return tuple(widths)


# -- simulation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p_s", "p_t", "widths", "branch_depth"),
    [
        (0.3, 0.03, (8, 4, 2, 1), 6),
        (0.6, 0.2, (3, 0, 5, 1, 0), 3),
        (0.5, 0.5, (2, 2), 1),
        (0.0, 0.4, (3, 3), 4),
        (0.8, 0.0, (2, 1, 1), 2),
        (0.9, 0.7, (1,), 8),
    ],
)
def test_spine_yield_matches_simulation(p_s: float, p_t: float, widths: tuple[int, ...], branch_depth: int) -> None:
    shape = spine_tree(widths, branch_depth)
    mean, error = simulate(shape, two_rates(shape, p_s, p_t), seed=len(widths))
    assert abs(spine_yield(p_s, p_t, len(widths), widths, branch_depth) - mean) <= 4 * error


@pytest.mark.parametrize(("p_t", "arity", "budget"), [(0.3, 3, 40), (0.05, 5, 60), (0.6, 2, 16), (0.4, 1, 9)])
def test_isotropic_yield_matches_simulation(p_t: float, arity: int, budget: int) -> None:
    shape = uniform_tree(arity, budget)
    mean, error = simulate(shape, [p_t] * budget, seed=arity)
    assert abs(isotropic_yield(p_t, arity, budget) - mean) <= 4 * error
    assert isotropic_yield(p_t, arity, budget) == pytest.approx(expected_yield(shape, geometric_acceptance(p_t, arity)))


@pytest.mark.parametrize(
    "acceptance", [(0.5, 0.2, 0.1, 0.05, 0.03, 0.02, 0.01, 0.01), (0.1,) * 8, (0.02,) * 7 + (0.8,)]
)
def test_yield_by_rank_matches_simulation(acceptance: tuple[float, ...]) -> None:
    shape = recycling_tree(60)
    mean, error = simulate(shape, by_rank(shape, acceptance), seed=5)
    assert abs(expected_yield(shape, acceptance) - mean) <= 4 * error


@pytest.mark.parametrize(("p_s", "p_t"), [(0.5, 0.2), (0.3, 0.3), (0.9, 0.05)])
def test_two_rate_yield_matches_simulation(p_s: float, p_t: float) -> None:
    shape, expected = two_rate_tree(p_s, p_t, 40)
    mean, error = simulate(shape, two_rates(shape, p_s, p_t), seed=7)
    assert abs(expected - mean) <= 4 * error


def test_known_values() -> None:
    assert spine_yield(0.5, 0.5, 2, (1, 0), 2) == pytest.approx(1 + 0.5 + 0.25 + 0.5 * 0.5 * 1.5)
    assert spine_yield(0.3, 0.1, 0, (), 6) == 1
    assert chain_yield(0.5, 3) == 1.875
    assert isotropic_yield(0.5, 2, 3) == 1.75
    assert isotropic_yield(0.5, 2, 4) == 1.75 + 0.25  # the last level has one node, the best one
    assert expected_yield(chain_tree(3), [0.5]) == 1.875
    assert expected_yield(chain_tree(0), []) == 1
    assert best_isotropic(0.03, 60)[0] == 59


# -- allocation ------------------------------------------------------------------------------------------------------

rates = st.floats(0.01, 0.98)


@given(rates, rates, st.integers(1, 12), st.integers(0, 60))
@example(0.5, 0.5, 4, 5)  # every marginal gain is tied
@example(0.98, 0.01, 12, 1)
def test_the_linear_schedule_is_optimal(p_s: float, p_t: float, spine_length: int, num_branches: int) -> None:
    linear = optimal_widths(p_s, p_t, spine_length, num_branches)
    greedy = greedy_widths(p_s, p_t, spine_length, num_branches)
    assert len(linear) == spine_length
    assert sum(linear) == sum(greedy) == num_branches
    assert list(linear) == sorted(linear, reverse=True)
    assert min(linear) >= 0
    yields = [spine_yield(p_s, p_t, spine_length, widths, 3) for widths in (linear, greedy)]
    assert yields[0] == pytest.approx(yields[1], abs=1e-12)
    harmonic = harmonic_widths(spine_length, num_branches)
    assert spine_yield(p_s, p_t, spine_length, harmonic, 3) <= yields[0] + 1e-12


def test_the_schedule_falls_by_the_slope_of_the_formula() -> None:
    widths = optimal_widths(0.8, 0.1, 6, 300)
    slope = np.log(0.8) / np.log(0.9)
    assert np.diff(widths) == pytest.approx([-slope] * 5, abs=1.01)
    assert widths[0] - widths[5] == pytest.approx(5 * slope, abs=1.01)


def test_allocation_at_the_edges() -> None:
    assert optimal_widths(0.0, 0.3, 3, 7) == (7, 0, 0)
    assert optimal_widths(0.3, 0.0, 3, 7) == (7, 0, 0)
    assert optimal_widths(0.3, 0.1, 0, 0) == greedy_widths(0.3, 0.1, 0, 5) == ()
    assert optimal_widths(0.3, 0.1, 2, 0) == (0, 0)


def test_harmonic_widths() -> None:
    assert harmonic_widths(3, 11) == (6, 3, 2)  # 11 / (1 + 1/2 + 1/3) = 6
    assert harmonic_widths(4, 10) == (4, 2, 1, 1)
    assert harmonic_widths(0, 10) == ()


def allocations(nodes: int, branches: int) -> Iterator[tuple[int, ...]]:
    if nodes == 1:
        yield (branches,)
        return
    for first in range(branches + 1):
        yield from ((first, *rest) for rest in allocations(nodes - 1, branches - first))


@given(rates, rates, st.integers(2, 9), st.integers(1, 3))
@settings(max_examples=40, deadline=None)
def test_the_best_spine_equals_brute_force(p_s: float, p_t: float, budget: int, branch_depth: int) -> None:
    best = max(
        spine_yield(p_s, p_t, length, widths, depth)
        for depth in range(1, branch_depth + 1)
        for length in range(1, budget)
        for widths in allocations(length, (budget - 1 - length) // depth)
    )
    plan = best_spine(p_s, p_t, budget, branch_depth)
    assert plan.expected == pytest.approx(best, abs=1e-12)
    assert plan.num_nodes == len(spine_tree(plan.widths, plan.branch_depth)) <= budget
    assert plan.expected == pytest.approx(
        spine_yield(p_s, p_t, plan.spine_length, plan.widths, plan.branch_depth), abs=1e-12
    )
    assert plan.expected == max(spine_yields(p_s, p_t, budget, plan.branch_depth))


def test_free_chains_count_only_first_node_of_a_branch() -> None:
    plan = best_spine(0.3, 0.03, 60, 6, free_chains=True)
    assert plan.spine_length + sum(plan.widths) == 59
    assert plan.num_nodes == 60 + 5 * sum(plan.widths)
    assert plan.expected > best_spine(0.3, 0.03, 60, 6).expected


# -- Sequoia ---------------------------------------------------------------------------------------------------------


def every_yield(acceptance: Sequence[float], nodes: int, depth: int) -> list[float]:
    """The yield of every tree with exactly this number of nodes."""

    def forests(rank: int, left: int) -> list[float]:
        """Every way to give ``left`` nodes to the children from ``rank`` on."""
        if left == 0:
            return [0.0]
        if rank == len(acceptance) or depth == 0:
            return []
        return [
            acceptance[rank] * child + others
            for size in range(1, left + 1)
            for child in every_yield(acceptance, size, depth - 1)
            for others in forests(rank + 1, left - size)
        ]

    return [1 + below for below in forests(0, nodes - 1)]


acceptances = st.lists(st.floats(0, 1), min_size=1, max_size=4).map(
    lambda values: [value / max(sum(values), 1.0) for value in values]
)


@given(acceptances, st.integers(1, 7), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
@example([0.1, 0.6, 0.3], 6, 3)  # the second child has the highest value but requires the first
def test_sequoia_equals_brute_force(acceptance: list[float], budget: int, max_depth: int) -> None:
    best = max(value for size in range(1, budget + 1) for value in every_yield(acceptance, size, max_depth))
    shape, expected = sequoia(acceptance, budget, max_depth)
    assert expected == pytest.approx(best, abs=1e-12)
    assert expected == expected_yield(shape, acceptance)
    assert len(shape) <= budget
    assert max(shape.depths) <= max_depth


@given(acceptances, st.integers(1, 40), st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_sequoia_equals_the_ranked_tree(acceptance: list[float], budget: int, max_depth: int) -> None:
    falling = sorted(acceptance, reverse=True)
    shape, expected = sequoia(falling, budget, max_depth)
    ranked = ranked_tree(falling, budget, max_depth)
    assert expected == pytest.approx(expected_yield(ranked, falling), abs=1e-12)
    assert len(shape) == len(ranked)


def test_sequoias_shape_is_ordered_best_first() -> None:
    acceptance = [0.53, 0.19, 0.07, 0.031]
    shape, _ = sequoia(acceptance, 64, 20)
    yields = [expected_yield(shape.first(size), acceptance) for size in range(1, 65)]
    assert yields == pytest.approx([expected_yield(ranked_tree(acceptance, n, 20), acceptance) for n in range(1, 65)])
    assert sequoia([1.0], 9, 20)[0] == chain_tree(8)
    assert sequoia([0.5, 0.3], 50, 2)[0] == ranked_tree([0.5, 0.3], 50, 2)  # all there is: 1 + 2 + 4 nodes


# -- which tree wins -------------------------------------------------------------------------------------------------


@given(st.floats(0.01, 0.3), st.floats(2, 20), st.integers(10, 60))
@settings(max_examples=60, deadline=None)
@example(0.15, 2.0, 60)
def test_a_spine_twice_as_good_beats_every_uniform_tree(p_t: float, ratio: float, budget: int) -> None:
    p_s = min(p_t * ratio, 0.95)
    assert best_spine(p_s, p_t, budget, 6).expected > best_isotropic(p_t, budget)[1]


@given(rates, rates, st.integers(2, 100))
@settings(max_examples=60, deadline=None)
def test_the_two_rate_tree_is_never_beaten(first: float, second: float, budget: int) -> None:
    p_t, p_s = sorted((first, second))
    acceptance = geometric_acceptance(p_t, budget)
    best = two_rate_tree(p_s, p_t, budget)[1] + 1e-9
    assert best >= expected_yield(ranked_tree(acceptance, budget, budget), acceptance)
    assert best >= best_spine(p_s, p_t, budget, 6).expected


def test_two_rate_tree_equals_sequoia_at_equal_rates() -> None:
    for rate in (0.05, 0.3, 0.7):
        assert two_rate_tree(rate, rate, 60)[1] == pytest.approx(sequoia(geometric_acceptance(rate, 60), 60, 60)[1])


def test_spine_with_chains_can_lose_if_rates_are_close() -> None:
    """The dominance the paper states for every p_s > p_t needs branches that branch again."""
    p_t, p_s = 0.2, 0.22
    isotropic = best_isotropic(p_t, 60)[1]
    assert best_spine(p_s, p_t, 60, 6).expected < isotropic < two_rate_tree(p_s, p_t, 60)[1]


@pytest.mark.parametrize("p_t", [0.02, 0.1, 0.4])
def test_advantage_of_spine_grows_with_its_rate(p_t: float) -> None:
    yields = [best_spine(p_s, p_t, 60, 6).expected for p_s in np.linspace(p_t, 0.95, 12)]
    assert (np.diff(yields) > 0).all()


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: spine_yield(1.0, 0.1, 1, (1,), 1), "p_s"),
        (lambda: best_spine(0.3, -0.1, 10, 1), "p_t"),
        (lambda: best_spine(float("nan"), 0.1, 10, 1), "p_s"),
        (lambda: best_spine(0.3, 0.1, 1, 1), "budget"),
        (lambda: best_spine(0.3, 0.1, 10_001, 1), "budget"),
        (lambda: best_spine(0.3, 0.1, 10, 0), "branch depth"),
        (lambda: spine_yield(0.3, 0.1, 2, (1,), 1), "one width per spine node"),
        (lambda: isotropic_yield(0.3, 0, 10), "arity"),
        (lambda: best_isotropic(0.3, 1), "budget"),
        (lambda: two_rate_tree(0.1, 0.2, 10), "better source"),
        (lambda: sequoia([0.7, 0.6], 10, 3), "acceptance"),
        (lambda: sequoia([-0.1], 10, 3), "acceptance"),
        (lambda: sequoia([0.5], MAX_SEQUOIA_BUDGET + 1, 3), "size"),
        (lambda: expected_yield(uniform_tree(3, 4), [0.5, 0.2]), "too few ranks"),
    ],
)
def test_invalid_arguments_are_refused(call: object, what: str) -> None:
    with pytest.raises(OptionError, match=what):
        call()  # type: ignore[operator]
