"""The sizes of drawn trees depend on earlier acceptance, never on the drawn tokens."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.sizing.costs import CostProfile
from draftwood.sizing.sizer import Experience
from draftwood.tree import DraftTree, Proposal, TreeBuilder
from tests.conftest import random_parents
from tests.tools.sizing import FREE, KNEE, PROFILES, cut, sizer


def drawn_tree(parents: Sequence[int], seed: int, source: str = "drawn") -> DraftTree:
    """A tree of that shape with different tokens, estimates and proposals for every seed."""
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
def test_size_does_not_depend_on_drawn_tokens(
    before: list[int], parents: list[int], seed: int, costs: str, learn: bool
) -> None:
    """Two requests with the same history draw differently: the same first nodes of the tree are verified."""
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


def test_size_does_not_depend_on_size_of_drawn_tree() -> None:
    by, large = sizer(KNEE), drawn_tree(random_parents(random.Random(1), 30), 1)
    size = len(cut(by, large))
    assert 1 < size < 30
    assert len(cut(by, large.first(size - 1))) == size - 1
    assert len(cut(by, large.first(size + 1))) == size


def test_small_drawn_tree_is_not_cut_further() -> None:
    """Whether the 6th node was drawn must not determine whether the 3rd is verified: all may depend on one token."""
    stairs = CostProfile((1, 2, 3, 32), (16,), ((1.0, 1.05, 1.9, 2.0),))
    large = drawn_tree(random_parents(random.Random(1), 30), 1)
    assert len(cut(sizer(stairs), large)) == 30
    assert len(cut(sizer(stairs), large.first(5))) == 5


def test_drawn_tree_size_follows_acceptance() -> None:
    chain = [-1, *range(11)]
    good, bad = sizer(), sizer()
    for seed in range(100):
        tree = drawn_tree(chain, seed)
        good.note(tree, tree, [*tree.tokens[1:], 99])
        bad.note(tree, tree, [99])
    assert len(cut(good, drawn_tree(chain, 0))) == 8
    assert len(cut(bad, drawn_tree(chain, 0))) == 1


def test_initially_unprofitable_drawn_trees_recover() -> None:
    """The emitted tokens show whether drawn guesses would have been right, as for chosen ones."""
    steep = CostProfile((1, 2, 4, 8), (16,), ((1.0, 1.7, 2.6, 4.4),))
    chain = [-1, *range(7)]
    by = sizer(steep)
    assert len(cut(by, drawn_tree(chain, 0))) == 1
    for seed in range(60):
        tree = drawn_tree(chain, seed)
        part = cut(by, tree)
        by.note(tree, part, [*tree.tokens[1 : len(part)], tree.tokens[len(part) % 8]])
    assert len(cut(by, drawn_tree(chain, 0))) == 8


def test_next_request_reuses_acceptance_of_drawn_trees() -> None:
    drafter = Experience()
    first = sizer(FREE, drafter)
    for seed in range(100):
        tree = drawn_tree([-1, 0, 1, 2], seed)
        first.note(tree, tree, [99])
    assert sizer(FREE, drafter)._chances_by_place()[0] < 0.1
    assert sizer(FREE)._chances_by_place()[0] == 0.5
