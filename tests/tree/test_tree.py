"""Draft trees keep their invariants, and masks and paths agree with each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import TreeError
from draftwood.tree import DraftTree, Proposal, TreeBuilder, ancestor_mask, is_chain, positions


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    builder = TreeBuilder(draw(st.integers(0, 9)))
    for _ in range(draw(st.integers(0, 25))):
        parent = draw(st.integers(0, len(builder) - 1))
        builder.add(parent, draw(st.integers(0, 9)), draw(st.sampled_from("ab")), draw(st.floats(0, 1)))
    return builder.build()


@given(trees())
def test_mask_rows_are_paths(tree: DraftTree) -> None:
    mask = ancestor_mask(tree.parents)
    for node in range(len(tree)):
        path = tree.path(node)
        assert np.flatnonzero(mask[node]).tolist() == path
        assert len(path) == tree.depths[node] + 1
        assert path[0] == 0
        assert path[-1] == node
    assert (np.diag(mask)).all()
    assert not np.triu(mask, 1).any()


@given(trees(), st.integers(0, 6))
def test_limited_keeps_exactly_the_shallow_nodes(tree: DraftTree, depth: int) -> None:
    cut = tree.limit_depth(depth)
    texts = sorted((tuple(tree.path_tokens(n)), tree.sources[n]) for n in range(len(tree)) if tree.depths[n] <= depth)
    assert sorted((tuple(cut.path_tokens(n)), cut.sources[n]) for n in range(len(cut))) == texts


@given(trees(), st.integers(1, 30))
def test_first_keeps_the_first_nodes(tree: DraftTree, size: int) -> None:
    part = tree.first(size)
    assert len(part) == min(size, len(tree))
    for node in range(len(part)):
        assert part.path(node) == tree.path(node)
        assert part.path_tokens(node) == tree.path_tokens(node)


@given(trees(), st.integers(0, 1 << 30))
def test_any_part_with_its_parents_is_a_tree(tree: DraftTree, dropped: int) -> None:
    kept = [0]
    for node in range(1, len(tree)):
        if tree.parents[node] in kept and not dropped >> node & 1:
            kept.append(node)
    part = tree.select(kept)
    assert part == DraftTree(part.tokens, part.parents, part.depths, part.sources, part.probs)  # validates the tree
    assert [part.path_tokens(node) for node in range(len(part))] == [tree.path_tokens(node) for node in kept]
    assert [part.sources, part.probs] == [tuple(column[node] for node in kept) for column in (tree.sources, tree.probs)]


@pytest.mark.parametrize("kept", [[], [1], [1, 2], [0, 3], [0, 2, 1], [0, 1, 1], [0, 2, 3]])
def test_parts_without_parents_are_refused(kept: list[int]) -> None:
    tree = DraftTree((1, 2, 3, 4, 5), (-1, 0, 0, 1, 1), (0, 1, 1, 2, 2), ("s",) * 5, (0.5,) * 5)
    with pytest.raises(TreeError, match="include their parents"):
        tree.select(kept)


@given(trees())
def test_a_child_is_found_by_its_token(tree: DraftTree) -> None:
    children = tree.children()
    for node in range(len(tree)):
        of_token = {tree.tokens[child]: child for child in children[node]}
        assert [tree.child_with(node, token) for token in range(10)] == [of_token.get(token) for token in range(10)]


@given(trees())
def test_paths_and_values_of_all_nodes(tree: DraftTree) -> None:
    paths, values = tree.paths(), tree.values()
    for node in range(len(tree)):
        assert paths[node] == tuple(tree.path_tokens(node))
        assert values[node] == pytest.approx(math.prod(tree.probs[above] for above in tree.path(node)[1:]))
        assert tree.follow([*paths[node], -1, 3]) == tree.path(node)[1:]


def test_parts_keep_proposals_of_drawn_children() -> None:
    tree = DraftTree(
        (1, 2, 3, 4, 5),
        (-1, 0, 0, 1, 1),
        (0, 1, 1, 2, 2),
        ("s",) * 5,
        (0.5,) * 5,
        {0: proposal(3, 7), 1: proposal(4, 5)},
        {0: 1},
    )
    assert tree.first(4).proposals.keys() == {0, 1}
    assert tree.first(2).num_chosen == {0: 1}
    assert tree.limit_depth(1).proposals.keys() == {0}
    assert tree.first(1).proposals == {}


@given(trees())
def test_children_and_leaves_agree_with_parents(tree: DraftTree) -> None:
    children = tree.children()
    assert sorted(child for group in children for child in group) == list(range(1, len(tree)))
    assert all(tree.parents[child] == node for node, group in enumerate(children) for child in group)
    assert tree.leaves() == [node for node, group in enumerate(children) if not group]
    assert positions(tree, 5) == [5 + depth for depth in tree.depths]


@given(trees())
def test_builder_merges_equal_siblings(tree: DraftTree) -> None:
    edges = [(tree.parents[node], tree.tokens[node]) for node in range(1, len(tree))]
    assert len(edges) == len(set(edges))


def test_merged_sibling_keeps_the_stronger_source() -> None:
    builder = TreeBuilder(1)
    first = builder.add(0, 7, "weak", 0.2)
    assert builder.add(0, 7, "strong", 0.6) == first
    assert builder.add(0, 7, "weaker", 0.1) == first
    tree = builder.build()
    assert (tree.sources[first], tree.probs[first], len(tree)) == ("strong", 0.6, 2)


def test_chain() -> None:
    tree = DraftTree.chain([5, 6, 7], "context")
    assert is_chain(tree.parents)
    assert tree.path_tokens(2) == [6, 7]
    assert not is_chain([-1, 0, 0])
    assert DraftTree.root_only(3).leaves() == [0]


def node(
    tokens: tuple[int, ...] = (1, 2, 3), parents: tuple[int, ...] = (-1, 0, 0), depths: tuple[int, ...] = (0, 1, 1)
) -> DraftTree:
    return DraftTree(tokens, parents, depths, ("s",) * len(tokens), (0.5,) * len(tokens))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": (), "parents": (), "depths": ()}, "at least its root"),
        ({"tokens": (1, 2)}, "differ in length"),
        ({"parents": (0, 0, 0)}, "must be the root"),
        ({"parents": (-1, 2, 0)}, "after its parent"),
        ({"parents": (-1, 0, 2)}, "after its parent"),
        ({"depths": (0, 1, 2)}, "wrong depth"),
        ({"tokens": (1, 2, 2)}, "two children with the token 2"),
    ],
)
def test_broken_trees_are_refused(change: dict[str, tuple[int, ...]], why: str) -> None:
    with pytest.raises(TreeError, match=why):
        node(**change)


def proposal(*ids: int) -> Proposal:
    return Proposal(np.array(ids), np.full(len(ids), 1 / len(ids)))


@pytest.mark.parametrize(
    ("proposals", "num_chosen", "why"),
    [
        ({9: proposal(1)}, {}, "belongs to no node"),
        ({0: proposal(2)}, {}, "outside its proposal"),
        ({0: proposal(2, 3)}, {0: 1}, "covers a chosen child"),
        ({0: proposal(2, 3)}, {0: 3}, "more chosen children than it has"),
    ],
)
def test_broken_proposals_are_refused(proposals: dict[int, Proposal], num_chosen: dict[int, int], why: str) -> None:
    with pytest.raises(TreeError, match=why):
        DraftTree((1, 2, 3), (-1, 0, 0), (0, 1, 1), ("s",) * 3, (0.5,) * 3, proposals, num_chosen)
