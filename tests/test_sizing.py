"""Trees cut for the machine: which nodes, how many, what is learned of them, and that output stays what it was."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.engine.costs import SIZES, CostProfile
from draftwood.engine.sizing import (
    DRAFTER_DECAY,
    FEWEST_WANTED,
    HOPE,
    PRIOR_TRIALS,
    REQUEST_DECAY,
    TRUST,
    AcceptanceRecord,
    Load,
    Sizer,
    beside,
)
from draftwood.tree import DraftTree, Proposal, TreeBuilder

from .conftest import random_parents

FREE = CostProfile(SIZES, (16,), ((1.0,) * len(SIZES),))
STEEP = CostProfile((1, 2, 4, 8), (16,), ((1.0, 1.6, 2.4, 4.0),))
KNEE = CostProfile((1, 16, 32), (16,), ((1.0, 1.1, 8.0),))  # flat, then steep
HOPELESS = CostProfile((1, 2, 16), (16,), ((1.0, 3.0, 31.0),))  # no guess is worth a second position
MILD = CostProfile((1, 2, 4, 8), (16,), ((1.0, 1.3, 1.8, 3.0),))
PROFILES = {"free": FREE, "mild": MILD, "steep": STEEP, "knee": KNEE, "hopeless": HOPELESS}
ALONE = Load()
CHAIN = DraftTree.chain(list(range(8)), "test")


def sizer(costs: CostProfile = STEEP, drafter_record: AcceptanceRecord | None = None) -> Sizer:
    return Sizer(costs, drafter_record or AcceptanceRecord(DRAFTER_DECAY))


def cut(by: Sizer, tree: DraftTree, load: Load = ALONE) -> DraftTree:
    return by.cut(tree, 16, 0.0, load)


def play(by: Sizer, accepted: Sequence[int], tree: DraftTree = CHAIN) -> Sizer:
    """Verifies a whole chain every time, of which so many nodes are right."""
    for count in accepted:
        by.note(tree, tree, [*tree.tokens[1 : count + 1], 999])
    return by


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
    """Of a tree whose sources nobody has any experience with: most of their estimates, siblings together 1 at most."""
    chances, taken = [1.0], [0.0] * len(tree)
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        share = min(TRUST * tree.probs[node], 1.0 - taken[parent])
        taken[parent] += share
        chances.append(chances[parent] * share)
    return chances


# -- which nodes, and how many ---------------------------------------------------------------------------------------


@given(estimated_trees(), cost_lines(), st.integers(0, 3))
@settings(max_examples=150, deadline=None)
def test_the_best_part_of_a_tree_by_trying_all(tree: DraftTree, costs: CostProfile, num_others: int) -> None:
    """No other part with all its parents promises more tokens per second, the others' share of the pass included."""
    load = Load(num_others, 1.3 * num_others)
    chances, seconds = chances_by_hand(tree), costs.of(16, 16)

    def worth(nodes: Sequence[int]) -> float:
        hopes = sum(HOPE * chances[node] for node in nodes[1:])
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
def test_whatever_was_learned_a_part_is_a_tree(tree: DraftTree, costs: str, steps: list[int]) -> None:
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


def test_free_positions_are_used_as_far_as_guesses_reach() -> None:
    assert len(cut(play(sizer(FREE), [7] * 100), CHAIN)) == 8
    doubtful = DraftTree.chain(list(range(40)), "test", [0.3] * 40)
    assert len(cut(sizer(FREE), doubtful)) > 10
    long = DraftTree.chain(list(range(33)), "test")
    assert len(cut(play(sizer(KNEE), [32] * 10, long), long)) == 16


def test_good_guesses_pay_for_positions_and_bad_ones_do_not() -> None:
    assert len(cut(play(sizer(), [7] * 100), CHAIN)) == 8
    assert len(cut(play(sizer(), [0] * 100), CHAIN)) == 1
    hesitant = CostProfile((1, 2, 3, 4, 5, 8), (16,), ((1.0, 1.6, 2.0, 2.4, 4.0, 8.0),))
    assert len(cut(play(sizer(hesitant), [2] * 100), CHAIN)) == 3
    assert len(cut(play(sizer(HOPELESS), [7] * 100), CHAIN)) == 1


def test_siblings_are_not_right_together() -> None:
    """Ten guesses of 0.5 for one token are worth one token at most, not five."""
    builder = TreeBuilder(0)
    for token in range(1, 11):
        builder.add(0, token, "test", 0.5 / TRUST)
    by = sizer(FREE)
    part = cut(by, builder.build())
    assert by.expected == pytest.approx(2.0)
    assert part.tokens == (0, 1, 2)


def test_the_longer_the_context_the_dearer_a_position() -> None:
    costs = CostProfile((1, 2, 8), (0, 1000), ((1.0, 1.1, 1.7), (1.0, 3.0, 15.0)))
    by = play(sizer(costs), [7] * 100)
    assert len(by.cut(CHAIN, 0, 0.0, ALONE)) == 8
    assert len(by.cut(CHAIN, 1000, 0.0, ALONE)) == 1


def test_drafting_that_takes_time_is_paid_by_larger_trees() -> None:
    """What is spent before the pass is spent whatever its size."""
    doubtful = DraftTree.chain(list(range(8)), "test", [0.5] * 8)
    by = sizer()
    assert len(cut(by, doubtful)) == 1
    for _ in range(50):
        by.cut(doubtful, 16, 5.0, ALONE)
    assert len(cut(by, doubtful)) > 1


def test_beside_others_the_marginal_cost_counts() -> None:
    """The first eight positions are free, but the others use them."""
    costs = CostProfile((1, 8, 16), (16,), ((1.0, 1.0, 9.0),))
    doubtful = DraftTree.chain(list(range(8)), "test", [0.6] * 8)
    assert len(cut(sizer(costs), doubtful)) == 8
    assert len(cut(sizer(costs), doubtful, Load(5, 5.0))) == 3
    assert len(cut(sizer(costs), doubtful, Load(7, 7.0))) == 1
    assert len(cut(sizer(costs), doubtful, Load(40, 40.0))) == 1  # far beyond what was measured


def test_loads_of_the_others() -> None:
    loads = [Load(1, 1.0), Load(4, 2.5), Load(8, 3.0)]
    assert beside(loads, 1) == Load(9, 4.0)
    assert beside(loads[:1], 0) == ALONE


def test_more_is_wanted_where_everything_paid() -> None:
    by = sizer(FREE)
    assert by.wanted == FEWEST_WANTED
    cut(by, DraftTree.chain(list(range(4)), "test"))
    assert by.wanted == FREE.largest == 64
    cut(by, DraftTree.root_only(0))  # nothing was offered: nothing is known anew
    assert by.wanted == 64


def test_some_more_is_wanted_than_was_used() -> None:
    cheap = CostProfile((1, 4, 64), (16,), ((1.0, 1.2, 20.0),))  # flat to 4, then steep
    some = sizer(cheap)
    used = len(cut(some, DraftTree.chain(list(range(20)), "test")))
    assert FEWEST_WANTED < 3 * used < cheap.largest
    assert some.wanted == 3 * used
    hopeless = sizer(HOPELESS)
    assert len(cut(hopeless, DraftTree.chain(list(range(12)), "test"))) == 1
    assert hopeless.wanted == FEWEST_WANTED
    assert sizer(STEEP).wanted == STEEP.largest == 8


def test_prompts_are_read_for_guesses_where_positions_are_cheap() -> None:
    assert [sizer(PROFILES[name]).reads_prompts for name in ("free", "knee", "mild")] == [True] * 3
    assert [sizer(PROFILES[name]).reads_prompts for name in ("steep", "hopeless")] == [False] * 2


# -- what is learned -------------------------------------------------------------------------------------------------

KIND = ("test", 5, 1, False)


def test_rates_move_from_estimates_to_what_was_seen() -> None:
    record = AcceptanceRecord(1.0)
    assert record.rate(KIND, 0.4) == pytest.approx(0.4)
    record.note(KIND, True)
    assert record.rate(KIND, 0.4) == pytest.approx((1 + PRIOR_TRIALS * 0.4) / (1 + PRIOR_TRIALS))
    for _ in range(999):
        record.note(KIND, False)
    assert record.rate(KIND, 0.4) < 0.01
    assert record.rate(("test", 5, 2, False), 0.4) == pytest.approx(0.4)  # another kind


def test_what_is_long_ago_counts_less() -> None:
    record = AcceptanceRecord(0.9)
    for right in [True] * 100 + [False] * 20:
        record.note(KIND, right)
    trials, hits = 1.0 / (1.0 - 0.9), 0.9**20 / (1.0 - 0.9)
    assert record.rate(KIND, 0.5) == pytest.approx((hits + PRIOR_TRIALS * 0.5) / (trials + PRIOR_TRIALS), rel=1e-3)


def test_a_request_starts_from_what_the_drafter_showed_before() -> None:
    drafter = AcceptanceRecord(DRAFTER_DECAY)
    first = AcceptanceRecord(REQUEST_DECAY, drafter)
    for _ in range(200):
        first.note(KIND, True)
    second = AcceptanceRecord(REQUEST_DECAY, drafter)
    assert second.rate(KIND, 0.0) == pytest.approx(drafter.rate(KIND, 0.0))
    assert drafter.rate(KIND, 0.0) > 0.9
    for _ in range(20):
        second.note(KIND, False)
    assert second.rate(KIND, 0.0) < 0.4  # its own experience counts most
    assert drafter.rate(KIND, 0.0) > 0.8
    assert first.rate(KIND, 0.0) > 0.9


def test_running_requests_learn_from_each_other() -> None:
    drafter = AcceptanceRecord(DRAFTER_DECAY)
    one, other = AcceptanceRecord(REQUEST_DECAY, drafter), AcceptanceRecord(REQUEST_DECAY, drafter)
    assert one.rate(KIND, 0.1) == pytest.approx(0.1)
    for _ in range(100):
        other.note(KIND, True)
    assert one.rate(KIND, 0.1) > 0.8


def test_the_next_request_of_a_drafter_need_not_learn_it_again() -> None:
    drafter = AcceptanceRecord(DRAFTER_DECAY)
    assert len(cut(sizer(drafter_record=drafter), CHAIN)) > 1  # the source is sure of itself
    play(sizer(drafter_record=drafter), [0] * 60)
    assert len(cut(sizer(drafter_record=drafter), CHAIN)) == 1


def test_sources_depths_and_estimates_are_told_apart() -> None:
    builder = TreeBuilder(0)
    good = builder.add(0, 1, "good", 0.6)
    builder.add(0, 2, "bad", 0.6)
    builder.add(0, 3, "good", 0.1)
    builder.add(good, 4, "good", 0.6)
    tree = builder.build()
    by = sizer()
    for _ in range(100):
        by.note(tree, tree, [1, 999])
    steep = cut(by, tree)
    assert steep.tokens == (0, 1)
    for _ in range(100):
        by.note(tree, tree, [1, 4, 999])
    assert set(cut(by, tree).tokens) == {0, 1, 4}


def test_right_guesses_come_in_runs() -> None:
    by = play(sizer(), ([7] * 20 + [0] * 20) * 5)
    assert len(cut(by, CHAIN)) == 1  # it ended in a run of wrong ones
    by.note(CHAIN, CHAIN.first(1), [1])  # a guess that was not verified would have been right
    assert len(cut(by, CHAIN)) > 1


def test_cycles_without_a_guess_say_nothing() -> None:
    by, same = play(sizer(), [7, 0, 7]), play(sizer(), [7, 0, 7])
    for _ in range(50):
        by.note(CHAIN.first(1), CHAIN.first(1), [5])
    assert by._chances(CHAIN) == same._chances(CHAIN)


def test_offered_guesses_that_were_not_verified_count_as_far_as_is_known() -> None:
    verified, unverified = sizer(), sizer()
    for _ in range(30):
        verified.note(CHAIN, CHAIN, [99])
        unverified.note(CHAIN, CHAIN.first(1), [99])
    assert verified._chances(CHAIN) == unverified._chances(CHAIN)
    # One emitted token tells of the first guess and of no other; the bonus token behind it tells of the second.
    first, second = sizer(), sizer()
    for _ in range(200):
        first.note(CHAIN, CHAIN.first(1), [1])
        second.note(CHAIN, CHAIN.first(2), [1, 99])
    doubtful = DraftTree.chain(list(range(8)), "test", [1.0, *[0.95] * 7])
    assert first._chances(doubtful)[:2] == pytest.approx([1.0, TRUST * 0.95], abs=0.01)
    assert second._chances(doubtful)[:2] == pytest.approx([1.0, 0.0], abs=0.05)


def test_guesses_that_did_not_pay_come_back_when_they_are_right_again() -> None:
    by = play(sizer(), [0] * 100)
    sizes = []
    for _ in range(40):
        part = cut(by, CHAIN)
        sizes.append(len(part))
        by.note(CHAIN, part, [*CHAIN.tokens[1 : len(part)], CHAIN.tokens[len(part) % 8]])
    assert sizes[0] == 1
    assert sizes[-1] == 8


# -- drawn trees -----------------------------------------------------------------------------------------------------


def drawn_tree(parents: Sequence[int], seed: int, source: str = "drawn") -> DraftTree:
    """A tree of that shape with other tokens, sources' estimates and proposals for every seed."""
    rng = np.random.default_rng(seed)
    builder = TreeBuilder(7)
    below = Counter(parents)
    drawn = {node: rng.choice(50, size=count, replace=False).tolist() for node, count in below.items() if node >= 0}
    for parent in parents[1:]:
        builder.add(parent, drawn[parent].pop(), source, float(rng.random()))
    uniform = Proposal(np.arange(50), np.full(50, 0.02))
    return builder.build(dict.fromkeys(drawn, uniform))


SHAPES = st.integers(0, 1 << 30).map(lambda seed: random_parents(random.Random(seed), 12))


@given(SHAPES, SHAPES, st.integers(1, 1 << 20), st.sampled_from(sorted(PROFILES)), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_size_of_a_drawn_tree_does_not_depend_on_what_was_drawn(
    before: list[int], parents: list[int], seed: int, costs: str, learn: bool
) -> None:
    """Two requests with the same past draw differently: the same first nodes of the tree are verified."""
    one, other = sizer(PROFILES[costs]), sizer(PROFILES[costs])
    if learn:
        past = drawn_tree(before, 0)
        for by in (one, other):
            for end in range(1, len(past)):
                by.note(past, past, [*past.path_tokens(end), 99])
    a, b = drawn_tree(parents, seed), drawn_tree(parents, seed + 1)
    assert a.probs != b.probs
    part, same = cut(one, a), cut(other, b)
    assert part.parents == same.parents == a.parents[: len(part)]
    assert part.tokens == a.tokens[: len(part)]
    assert one.expected == other.expected


def test_the_size_does_not_depend_on_how_large_the_drawn_tree_became() -> None:
    by, large = sizer(KNEE), drawn_tree(random_parents(random.Random(1), 30), 1)
    size = len(cut(by, large))
    assert 1 < size < 30
    assert len(cut(by, large.first(size - 1))) == size - 1
    assert len(cut(by, large.first(size + 1))) == size


def test_a_drawn_tree_that_stayed_small_is_not_cut_for_that() -> None:
    """Whether the 6th node was drawn must not settle whether the 3rd is verified: all of them may hang on one token."""
    stairs = CostProfile((1, 2, 3, 32), (16,), ((1.0, 1.05, 1.9, 2.0),))
    large = drawn_tree(random_parents(random.Random(1), 30), 1)
    assert len(cut(sizer(stairs), large)) == 30
    assert len(cut(sizer(stairs), large.first(5))) == 5


def test_drawn_trees_grow_and_shrink_with_what_was_accepted() -> None:
    chain = [-1, *range(11)]
    good, bad = sizer(), sizer()
    for seed in range(100):
        tree = drawn_tree(chain, seed)
        good.note(tree, tree, [*tree.tokens[1:], 99])
        bad.note(tree, tree, [99])
    assert len(cut(good, drawn_tree(chain, 0))) == 8
    assert len(cut(bad, drawn_tree(chain, 0))) == 1


def test_drawn_trees_that_do_not_pay_at_first_are_not_given_up() -> None:
    """Whether drawn guesses would have been right shows in what was emitted, as it does with chosen ones."""
    steep = CostProfile((1, 2, 4, 8), (16,), ((1.0, 1.7, 2.6, 4.4),))
    chain = [-1, *range(7)]
    by = sizer(steep)
    assert len(cut(by, drawn_tree(chain, 0))) == 1
    for seed in range(60):
        tree = drawn_tree(chain, seed)
        part = cut(by, tree)
        by.note(tree, part, [*tree.tokens[1 : len(part)], tree.tokens[len(part) % 8]])
    assert len(cut(by, drawn_tree(chain, 0))) == 8


def test_the_next_request_knows_how_drawn_trees_fared() -> None:
    drafter = AcceptanceRecord(DRAFTER_DECAY)
    first = sizer(FREE, drafter)
    for seed in range(100):
        tree = drawn_tree([-1, 0, 1, 2], seed)
        first.note(tree, tree, [99])
    assert sizer(FREE, drafter)._chances_by_place()[0] < 0.1
    assert sizer(FREE)._chances_by_place()[0] == 0.5
