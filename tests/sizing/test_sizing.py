"""Trees are cut for the machine: which nodes are kept, and how many."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.sizing.chances import DISCOUNT, TRUST, AcceptanceRecord, PythonGuesses
from draftwood.sizing.costs import CostProfile
from draftwood.sizing.live import HostCosts, LiveCosts
from draftwood.sizing.sizer import MIN_WANTED, Experience, Load, Sizer
from draftwood.tree import DraftTree, TreeBuilder
from tests.conftest import random_parents
from tests.tools.sizing import CHAIN, FREE, HOPELESS, KNEE, PROFILES, STEEP, cut, cut_all, drafts_of, play, sizer


@st.composite
def estimated_trees(draw: st.DrawFn, max_size: int = 9, sources: Sequence[str] = ("a", "b")) -> DraftTree:
    rng = random.Random(draw(st.integers(0, 1 << 30)))
    parents = random_parents(rng, draw(st.integers(1, max_size)))
    builder = TreeBuilder(0)
    for token, parent in enumerate(parents[1:], start=1):
        builder.add(parent, token, rng.choice(sources), rng.choice([0.0, 0.01, 0.3, 0.5, 0.7, 0.99, 1.0]))
    return builder.build()


@st.composite
def cost_lines(draw: st.DrawFn) -> CostProfile:
    steps = draw(st.lists(st.floats(0.0, 1.5), min_size=11, max_size=11))
    return CostProfile(tuple(range(1, 13)), (16,), (tuple(np.cumsum([1.0, *steps]).tolist()),))


def chances_by_hand(tree: DraftTree) -> list[float]:
    """Chances of a tree with unknown sources: a share of the estimates, siblings sum to at most 1."""
    chances, taken = [1.0], [0.0] * len(tree)
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        share = min(TRUST * tree.probs[node], 1.0 - taken[parent])
        taken[parent] += share
        chances.append(chances[parent] * share)
    return chances


@given(estimated_trees(), cost_lines(), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_best_part_matches_brute_force(tree: DraftTree, costs: CostProfile, num_others: int) -> None:
    """No other part that includes its parents has more expected tokens per second, with the load of other requests."""
    load = Load(num_others, 1.3 * num_others)
    chances, seconds = chances_by_hand(tree), costs.of(16, 16)

    def worth(nodes: Sequence[int]) -> float:
        hopes = sum(DISCOUNT * chances[node] for node in nodes[1:])
        return (load.tokens + 1.0 + hopes) / seconds[load.positions + len(nodes) - 1]

    whole = [
        nodes
        for size in range(len(tree))
        for below in combinations(range(1, len(tree)), size)
        if {tree.parents[node] for node in below} <= {*(nodes := (0, *below))}
    ]
    by = sizer(costs)
    part = cut(by, tree, load)
    kept = [0, *part.tokens[1:]]  # tokens number the nodes
    assert worth(kept) == pytest.approx(max(map(worth, whole)))
    assert sum(chances[node] for node in kept) == pytest.approx(
        max(sum(chances[node] for node in nodes) for nodes in whole if len(nodes) == len(kept))
    )
    assert by.expected == pytest.approx(sum(chances[node] for node in kept))


@given(estimated_trees(max_size=40), st.sampled_from(sorted(PROFILES)), st.lists(st.integers(0, 40), max_size=30))
@settings(max_examples=60, deadline=None)
def test_selected_part_is_always_a_tree(tree: DraftTree, costs: str, steps: list[int]) -> None:
    by = sizer(PROFILES[costs])
    for step in steps:
        part = cut(by, tree)
        assert part.tokens[0] == tree.tokens[0]
        assert set(zip(part.tokens, part.sources, part.depths, strict=True)) <= set(
            zip(tree.tokens, tree.sources, tree.depths, strict=True)
        )
        path = part.path(step % len(part))
        by.note(tree, part, [*(part.tokens[node] for node in path[1:]), 999])
        assert 1 <= by.wanted <= PROFILES[costs].largest


def test_free_positions_are_used_for_all_guesses() -> None:
    assert len(cut(play(sizer(FREE), [7] * 100), CHAIN)) == 8
    doubtful = DraftTree.chain(list(range(40)), "test", [0.3] * 40)
    assert len(cut(sizer(FREE), doubtful)) > 8  # the last ones have a chance of 1e-6
    long = DraftTree.chain(list(range(33)), "test")
    assert len(cut(play(sizer(KNEE), [32] * 10, long), long)) == 16


def test_nodes_that_teach_are_verified_where_positions_are_cheap() -> None:
    hopeless = DraftTree.chain(list(range(8)), "test", [0.0] * 8)
    for costs, size in ((FREE, 8), (KNEE, 8), (STEEP, 1), (HOPELESS, 1)):
        for lesson, kept in ((0.0, 1), (0.02, size)):
            by = sizer(costs)
            assert len(cut_all(drafts_of([by], [hopeless], lesson=lesson))[0]) == kept
            assert by.expected == pytest.approx(1.0)


def test_good_guesses_pay_for_positions_and_bad_ones_do_not() -> None:
    assert len(cut(play(sizer(), [7] * 100), CHAIN)) == 8
    assert len(cut(play(sizer(), [0] * 100), CHAIN)) == 1
    hesitant = CostProfile((1, 2, 3, 4, 5, 8), (16,), ((1.0, 1.6, 2.0, 2.4, 4.0, 8.0),))
    assert len(cut(play(sizer(hesitant), [2] * 100), CHAIN)) == 3
    assert len(cut(play(sizer(HOPELESS), [7] * 100), CHAIN)) == 1


def test_siblings_are_mutually_exclusive() -> None:
    """Ten guesses of 0.5 for one token are worth one token at most, not five."""
    builder = TreeBuilder(0)
    for token in range(1, 11):
        builder.add(0, token, "test", 0.5 / TRUST)
    by = sizer(FREE)
    part = cut(by, builder.build())
    assert by.expected == pytest.approx(2.0)
    assert part.tokens == (0, 1, 2)


@pytest.mark.parametrize("estimate", [float("nan"), -3.0, 0.0])
def test_senseless_estimates_are_worth_nothing(estimate: float) -> None:
    tree = DraftTree((0, 1, 2), (-1, 0, 0), (0, 1, 1), ("root", "test", "test"), (1.0, estimate, 0.5))
    core = sizer(FREE)
    part = cut(core, tree)
    assert 2 in part.tokens
    assert core.expected == pytest.approx(1.0 + TRUST * 0.5)
    by_python = PythonGuesses(AcceptanceRecord(0.9, AcceptanceRecord(0.9)))
    assert by_python.chances(tree) == pytest.approx([0.0, TRUST * 0.5])


def test_positions_cost_more_in_longer_contexts() -> None:
    costs = CostProfile((1, 2, 8), (0, 1000), ((1.0, 1.1, 1.7), (1.0, 3.0, 15.0)))
    by = play(sizer(costs), [7] * 100)
    assert len(cut(by, CHAIN, context=0)) == 8
    assert len(cut(by, CHAIN, context=1000)) == 1


def test_slow_drafting_gives_larger_trees() -> None:
    """Time spent before the pass does not depend on its size."""
    doubtful = DraftTree.chain(list(range(8)), "test", [0.5] * 8)
    by = sizer()
    assert len(cut(by, doubtful)) == 1
    for _ in range(50):
        cut(by, doubtful, draft_seconds=5.0)
    assert len(cut(by, doubtful)) > 1


def test_marginal_cost_counts_in_a_batch() -> None:
    """The first eight positions are free, but other requests use them."""
    costs = CostProfile((1, 8, 16), (16,), ((1.0, 1.0, 9.0),))
    doubtful = DraftTree.chain(list(range(8)), "test", [0.6] * 8)
    assert len(cut(sizer(costs), doubtful)) == 8
    assert len(cut(sizer(costs), doubtful, Load(5, 5.0))) == 3
    assert len(cut(sizer(costs), doubtful, Load(7, 7.0))) == 1
    assert len(cut(sizer(costs), doubtful, Load(40, 40.0))) == 1  # far beyond the measured sizes


def test_wanted_size_grows_if_all_nodes_paid() -> None:
    steps = CostProfile((1, 4, 16, 64), (16,), ((1.0, 1.21, 1.47, 1.78),), stepped=True)
    some = sizer(steps)
    assert len(cut(some, DraftTree.chain(list(range(4)), "test"))) == 4
    assert some.wanted == 3 * 4 + 4
    by = sizer(FREE)
    assert by.wanted == MIN_WANTED
    cut(by, DraftTree.chain(list(range(4)), "test"))
    assert by.wanted == FREE.largest == 64
    cut(by, DraftTree.root_only(0))  # nothing was offered: nothing new is known
    assert by.wanted == 64


def test_wanted_size_stays_if_the_drafter_has_no_more() -> None:
    """One guess says nothing about the copy that may begin after it."""
    steps = CostProfile((1, 4, 16, 64), (16,), ((1.0, 1.21, 1.47, 3.0),), stepped=True)
    some = sizer(steps)
    assert len(cut(some, DraftTree.chain(list(range(16)), "test"))) == 16
    wanted = some.wanted
    assert len(cut(some, DraftTree.chain([0, 1], "test"))) == 2
    assert some.wanted == wanted


def test_wanted_size_exceeds_used_size() -> None:
    cheap = CostProfile((1, 4, 64), (16,), ((1.0, 1.2, 20.0),))  # flat to 4, then steep
    some = sizer(cheap)
    used = len(cut(some, DraftTree.chain(list(range(20)), "test")))
    assert MIN_WANTED < 2 * used + 4 < cheap.largest
    assert some.wanted == used + used // 2 + 4
    hopeless = sizer(HOPELESS)
    assert len(cut(hopeless, DraftTree.chain(list(range(12)), "test"))) == 1
    assert hopeless.wanted == MIN_WANTED
    assert sizer(STEEP).wanted == STEEP.largest == 8


def test_wanted_size_reaches_over_a_step() -> None:
    """Five more nodes do not pay, for which the pass takes longer; as many as it then has room for might."""
    sizes = (1, 8, 16, 24, 32, 64)
    for step, wanted in ((0.12, 24), (0.3, 16)):
        seconds = (1.0, 1.0, 1.0 + step, 1.0 + step, 5.0, 5.0)
        some = sizer(CostProfile(sizes, (16,), (seconds,), stepped=True))
        assert len(cut(some, DraftTree.chain(list(range(12)), "test", [0.6] * 8 + [0.01] * 4))) == 8
        assert some.wanted == wanted


def test_prompt_logits_are_read_if_large_passes_are_cheap() -> None:
    gpu = CostProfile((1, 16, 64, 128), (16,), ((1.0, 1.12, 1.35, 1.8),))
    assert [sizer(profile).reads_prompt(500, 128, 1) for profile in (FREE, gpu)] == [True] * 2
    others = ("knee", "mild", "steep", "hopeless")
    assert [sizer(PROFILES[name]).reads_prompt(500, 128, 1) for name in others] == [False] * 4


def test_prompt_logits_are_not_read_if_the_passes_that_they_save_are_shared_by_many() -> None:
    gpu = sizer(CostProfile((1, 16, 64, 128), (16,), ((1.0, 1.12, 1.35, 1.8),)))
    assert [gpu.reads_prompt(100, 128, count) for count in (1, 8, 32)] == [True, True, False]
    assert [gpu.reads_prompt(length, 128, 8) for length in (100, 1000)] == [True, False]
    assert [gpu.reads_prompt(200, answer, 16) for answer in (32, 1000)] == [False, True]


def test_nodes_go_to_the_requests_where_they_gain_most() -> None:
    """Sixteen positions are nearly free: a request that guesses well gets those that others would waste."""
    costs, drafter = LiveCosts(CostProfile((1, 16, 17, 64), (16,), ((1.0, 1.1, 4.0, 40.0),))), Experience()
    sure = DraftTree.chain(list(range(20)), "sure", [0.95] * 20)
    doubtful = DraftTree.chain(list(range(20)), "doubtful", [0.3] * 20)
    trees = [sure, doubtful, sure, doubtful]
    sizes = [len(tree) for tree in cut_all(drafts_of([Sizer(costs, drafter) for _ in trees], trees))]
    assert sum(sizes) == 16
    assert sizes[0] == sizes[2] > 2 * sizes[1] == 2 * sizes[3]


def test_time_of_the_host_counts() -> None:
    """A node that the pass computes for nothing still has to be drafted, accepted and learned from."""
    chain = DraftTree.chain(list(range(12)), "test", [0.7] * 12)
    quick, slow = LiveCosts(FREE), LiveCosts(FREE)
    for nodes in [2, 10] * 50:
        quick.host.note(4, 4 * nodes, 4 * (0.01 + 1e-6 * nodes))
        slow.host.note(4, 4 * nodes, 4 * (0.01 + 0.1 * nodes))
    assert slow.host.per_node == pytest.approx(0.1, rel=0.35)
    assert slow.host.per_request < 0.3
    assert quick.host.per_node < 1e-4
    few, many = (len(cut(Sizer(costs, Experience()), chain)) for costs in (slow, quick))
    assert few < many


def test_disturbed_cycles_hardly_change_the_costs_of_the_host() -> None:
    host = HostCosts()
    for cycle in range(200):
        host.note(2, 20, 2 * 50e-6 if cycle % 50 else 5.0)
    assert host.per_request + 10 * host.per_node < 100e-6
