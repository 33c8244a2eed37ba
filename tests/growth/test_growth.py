"""Growth policies: best-first growth equals brute force, spine trees have the sizes of the paper's Algorithm 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from math import floor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.growth.best_first import GrowthLimits, Lookup, Start, Successors, grow_best_first
from draftwood.growth.spine import BRANCH, SPINE, Anchor, SpineBudget, grow_spine_tree
from draftwood.tree import DraftTree, TreeBuilder
from tests.tools.growth import NUM_TOKENS, Table, make_lookup, tables

MIN_SCORE = 0.01


def fan(width: int, score: float = 0.08) -> Lookup:
    """Every token has the same number of successors, all distinct."""

    def lookup(previous: int, token: int) -> Successors:
        return [1000 * (token + 1) + rank for rank in range(width)], [score - rank * 1e-3 for rank in range(width)]

    return lookup


def nothing(previous: int, token: int) -> Successors:
    return [], []


def all_values(table: Table, start: Start, max_depth: int, taken: frozenset[int] = frozenset()) -> list[float]:
    """The values of all nodes below a start, without ``taken`` children and their subtrees."""
    if start.depth >= max_depth:
        return []
    values = []
    for token, score in zip(*table[start.previous, start.token], strict=True):
        if score >= MIN_SCORE and token not in taken:
            child = Start(-1, start.token, token, start.value * score, start.depth + 1)
            values += [child.value, *all_values(table, child, max_depth)]
    return values


def value_of(tree: DraftTree, node: int) -> float:
    value = 1.0
    for step in tree.path(node):
        value *= tree.probs[step]
    return value


# -- best first ------------------------------------------------------------------------------------------------------


@given(tables(), st.integers(1, 40), st.integers(1, 4))
@settings(deadline=None)
def test_best_first_takes_the_best_of_all_nodes(table: Table, budget: int, max_depth: int) -> None:
    root = Start(0, 0, 1, 1.0)
    builder = TreeBuilder(1)
    grow_best_first(builder, [root], make_lookup(table), GrowthLimits("t", budget, max_depth, MIN_SCORE))
    tree = builder.build()
    best = sorted(all_values(table, root, max_depth), reverse=True)[: budget - 1]
    assert len(tree) == 1 + len(best)
    assert sum(value_of(tree, node) for node in range(1, len(tree))) == pytest.approx(sum(best))
    assert min(tree.probs) >= MIN_SCORE
    assert max(tree.depths) <= max_depth


@given(tables(), st.lists(st.integers(0, NUM_TOKENS - 1), max_size=4), st.integers(0, 30), st.integers(1, 3))
@settings(deadline=None)
def test_best_first_grows_around_existing_nodes(table: Table, spine: list[int], more: int, max_depth: int) -> None:
    builder = TreeBuilder(1)
    starts = [Start(0, 0, 1, 1.0)]
    for token in spine:
        node = builder.add(starts[-1].node, token, "there", 0.5)
        starts.append(Start(node, starts[-1].token, token, starts[-1].value * 0.5))
    asked: list[tuple[int, int]] = []

    def lookup(previous: int, token: int) -> Successors:
        asked.append((previous, token))
        return table[previous, token]

    before = builder.build()
    budget = len(before) + more
    grow_best_first(builder, starts, lookup, GrowthLimits("t", budget, max_depth, MIN_SCORE))
    tree = builder.build()
    assert tree.first(len(before)) == before  # neither tags nor probabilities changed
    candidates = []
    for i, start in enumerate(starts):
        candidates += all_values(table, start, max_depth, frozenset(spine[i : i + 1]))
    best = sorted(candidates, reverse=True)[:more]
    assert len(tree) == len(before) + len(best)
    grown = sum(value_of(tree, node) for node in range(len(before), len(tree)))
    assert grown == pytest.approx(sum(best))
    # Every context is looked up at most once.
    places = [(start.previous, start.token) for start in starts]
    places += [(tree.tokens[tree.parents[node]], tree.tokens[node]) for node in range(len(before), len(tree))]
    assert not Counter(asked) - Counter(places)


@pytest.mark.parametrize("budget", [1, 2, 11, 12, 60, 111, 200])
def test_best_first_uses_the_whole_budget(budget: int) -> None:
    builder = TreeBuilder(0)
    grow_best_first(
        builder,
        [Start(0, 0, 0, 1.0)],
        fan(10),
        GrowthLimits(source="t", budget=budget, max_depth=6, min_score=MIN_SCORE),
    )
    assert len(builder) == budget


def test_best_first_starts_from_a_rank() -> None:
    builder = TreeBuilder(0)
    start = Start(0, 0, 0, 1.0, 0, 2)
    grow_best_first(builder, [start], fan(4), GrowthLimits(source="t", budget=9, max_depth=1, min_score=MIN_SCORE))
    assert builder.build().tokens == (0, 1002, 1003)


def test_ties_go_to_the_earlier_start() -> None:
    builder = TreeBuilder(0)
    nodes = [builder.add(0, token, "there", 0.5) for token in (5, 6, 7)]
    starts = [Start(node, 0, token, 0.5) for node, token in zip(nodes, (5, 6, 7), strict=True)]
    grow_best_first(builder, starts, fan(1), GrowthLimits(source="t", budget=6, max_depth=1, min_score=MIN_SCORE))
    assert builder.build().parents[4:] == (nodes[0], nodes[1])


def test_starts_are_expanded_in_order_of_best_child() -> None:
    # Half of 0.9 is more than 0.4: the less likely start has the better child.
    table = {(0, 1): ([5, 6], [0.5, 0.4]), (1, 5): ([7], [0.9])}
    builder = TreeBuilder(1)
    starts = [Start(0, 0, 1, 1.0), Start(builder.add(0, 5, "there", 0.5), 1, 5, 0.5)]
    grow_best_first(builder, starts, make_lookup(table), GrowthLimits("t", 3, 3, MIN_SCORE))
    assert builder.build().tokens == (1, 5, 7)


def test_zero_scores_are_not_guesses() -> None:
    builder = TreeBuilder(0)
    table = {(0, 0): ([4, -1, -1], [0.5, 0.0, 0.0])}
    grow_best_first(builder, [Start(0, 0, 0, 1.0)], make_lookup(table), GrowthLimits("t", 9, 6, 1e-9))
    assert builder.build().tokens == (0, 4)


# -- the spine tree --------------------------------------------------------------------------------------------------


def spine_of(length: int) -> list[int]:
    return [100 + i for i in range(length)]


def plan(ratio: float = 0.3, **changes: float) -> SpineBudget:
    return SpineBudget(spine_ratio=ratio)._replace(**changes)


def trusted(spine: Sequence[int]) -> list[float]:
    return [0.8] * len(spine)


@given(
    st.integers(1, 70),
    st.integers(0, 25),
    st.sampled_from(["0.15", "0.3", "0.5", "0.7", "0.29"]),
    st.sampled_from(["0.5", "0.25", "0.8", "0.9", "0", "1"]),
    st.integers(1, 12),
)
@settings(deadline=None, max_examples=300)
def test_the_budget_is_divided_as_in_algorithm_1(budget: int, copied: int, ratio: str, share: str, width: int) -> None:
    spine = spine_of(copied)
    # With branches of one level nothing is extended: the rest of the budget is what was divided.
    divided = plan(float(ratio), spine_share=float(share), best_first=False, branch_depth=1)
    tree = grow_spine_tree(Anchor(0, 1), spine, trusted(spine), fan(width), budget, divided)

    num_spine = min(copied, floor(budget * Fraction(ratio)))
    free = budget - 1 - num_spine
    num_root = floor(free * (1 - Fraction(share))) if num_spine else free
    harmonic = sum(Fraction(1, i) for i in range(1, num_spine + 1))
    along = [floor((free - num_root) * Fraction(1, i) / harmonic) for i in range(1, num_spine + 1)]

    assert tree.sources.count(SPINE) == num_spine
    branches = [[c for c in children if tree.sources[c] == BRANCH] for children in tree.children()]
    on_spine = [0, *(node for node in range(len(tree)) if tree.sources[node] == SPINE)]
    assert [len(branches[node]) for node in on_spine] == [min(width, count) for count in (num_root, *along)]


def test_remaining_node_goes_to_the_spine() -> None:
    # 60 positions, 18 of spine: 41 are left, 20 for the root and 21 along the spine.
    spine = spine_of(20)
    divided = plan(best_first=False, branch_depth=1)
    tree = grow_spine_tree(Anchor(0, 1), spine, trusted(spine), fan(30), 60, divided)
    assert len(tree.children_of(0)) == 1 + 20
    assert [len(tree.children_of(node)) - 1 for node in range(1, 8)] == [6, 3, 2, 1, 1, 1, 0]


@given(
    tables(),
    st.integers(1, 70),
    st.lists(st.integers(0, NUM_TOKENS - 1), max_size=25),
    st.sampled_from([0.0, 0.15, 0.3, 0.5, 1.0]),
    st.booleans(),
    st.booleans(),
    st.integers(1, 6),
)
@settings(deadline=None, max_examples=300)
def test_any_spine_tree_is_a_chain_with_branches(
    table: Table, budget: int, spine: list[int], ratio: float, best_first: bool, spine_branches: bool, depth: int
) -> None:
    made = plan(ratio, best_first=best_first, spine_branches=spine_branches, branch_depth=depth)
    trust = [0.9 - 0.01 * i for i in range(len(spine))]
    tree = grow_spine_tree(Anchor(0, 1), spine, trust, make_lookup(table), budget, made)
    assert len(tree) <= budget
    length = tree.sources.count(SPINE)
    assert length == min(len(spine), int(budget * ratio), budget - 1)
    assert tree.tokens[1 : 1 + length] == tuple(spine[:length])
    assert tree.sources[: 1 + length] == ("root", *(SPINE,) * length)
    assert tree.parents[: 1 + length] == tuple(range(-1, length))
    assert tree.probs[1 : 1 + length] == tuple(trust[:length])
    assert tree.route == ("spine" if length else "branch")
    for node in range(1 + length, len(tree)):
        path = tree.path(node)
        off = [step for step in path if step > length]
        assert len(off) <= depth  # counted from where the branch leaves the spine
        assert spine_branches or path[1] > length
        previous = tree.tokens[path[-3]] if len(path) > 2 else 0
        tokens, scores = table[previous, tree.tokens[path[-2]]]
        assert tree.probs[node] == scores[tokens.index(tree.tokens[node])] >= MIN_SCORE
        assert tree.sources[node] == BRANCH


@pytest.mark.parametrize("best_first", [False, True])
@pytest.mark.parametrize("budget", [2, 3, 12, 20, 60, 64])
def test_unlimited_guesses_fill_the_budget(budget: int, best_first: bool) -> None:
    for length in (0, 1, 5, 20):
        spine = spine_of(length)
        made = plan(best_first=best_first)
        assert len(grow_spine_tree(Anchor(0, 1), spine, trusted(spine), fan(10, 0.5), budget, made)) == budget


@pytest.mark.parametrize("best_first", [False, True])
def test_branch_depth_counts_from_the_spine(best_first: bool) -> None:
    made = plan(0.5, best_first=best_first, branch_depth=4)
    spine = spine_of(3)
    tree = grow_spine_tree(Anchor(0, 1), spine, trusted(spine), fan(1, 0.9), 30, made)
    # The root and the three spine nodes have one branch of four levels each.
    assert Counter(tree.depths) == Counter(
        [0, 1, 2, 3] + [start + level for start in range(4) for level in range(1, 5)]
    )


def test_a_branch_does_not_repeat_the_spine() -> None:
    table = {(0, 1): ([7, 8, 9], [0.5, 0.2, 0.1]), (1, 7): ([8, 7], [0.6, 0.3])}
    made = plan(0.5, best_first=False, branch_depth=1)
    tree = grow_spine_tree(Anchor(0, 1), [7], [0.4], make_lookup(table), 6, made)
    assert tree.tokens == (1, 7, 8, 9, 8, 7)
    assert tree.parents == (-1, 0, 0, 0, 1, 1)
    # The table gives 7 a higher score than the spine; it still belongs to the spine.
    assert (tree.sources[1], tree.probs[1]) == (SPINE, 0.4)


def test_unused_budget_extends_existing_branches() -> None:
    table = {(0, 1): ([7, 8, 9], [0.5, 0.3, 0.2])}
    # The spine leaves three nodes: one for the root, and the spine cannot use the other two.
    tree = grow_spine_tree(Anchor(0, 1), [5], [0.8], make_lookup(table), 5, plan(0.3, spine_share=0.6))
    assert tree.tokens == (1, 5, 7, 8, 9)


def test_successors_of_a_small_score_are_dropped() -> None:
    table = {(0, 1): ([7, 8, 9], [0.5, 0.01, 0.0099])}
    for best_first in (False, True):
        tree = grow_spine_tree(Anchor(0, 1), [], [], make_lookup(table), 60, plan(best_first=best_first))
        assert tree.tokens == (1, 7, 8)


def test_single_source() -> None:
    spine = spine_of(20)
    for best_first in (False, True):
        made = plan(best_first=best_first)
        chain = grow_spine_tree(Anchor(0, 1), spine, trusted(spine), nothing, 60, made)
        assert (len(chain), chain.route, max(chain.depths)) == (19, "spine", 18)
        branches = grow_spine_tree(Anchor(0, 1), [], [], fan(10), 60, made)
        assert (len(branches), branches.route, len(branches.children_of(0))) == (60, "branch", 10)
        assert len(grow_spine_tree(Anchor(0, 1), [], [], nothing, 60, made)) == 1


def test_likelier_leaf_gets_more_nodes_per_level() -> None:
    table = {
        (0, 1): ([2, 3], [0.8, 0.1]),
        (1, 2): ([5, 6, 7, 8, 9, 10], [0.3] * 6),
        (1, 3): ([5, 6, 7, 8, 9, 10], [0.3] * 6),
    }
    tree = grow_spine_tree(Anchor(0, 1), [], [], make_lookup(table), 12, plan(best_first=False))
    # Nine are left for two leaves: 0.8 / 0.9 and 0.1 / 0.9 of them, but not more than available.
    assert [len(tree.children_of(node)) for node in (1, 2)] == [6, 1]
    best = grow_spine_tree(Anchor(0, 1), [], [], make_lookup(table), 12, plan())
    assert [len(best.children_of(node)) for node in (1, 2)] == [6, 3]
