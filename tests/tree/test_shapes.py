"""Invariants of tree shapes, results of the builders, and round trips through files."""

from __future__ import annotations

import json
from itertools import product
from math import prod
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import DraftwoodError, OptionError, TreeError
from draftwood.tree.shapes import (
    FORMAT,
    VERSION,
    TreeShape,
    best_first,
    chain_tree,
    initial_tree,
    prune,
    ranked_tree,
    recycling_tree,
    spine_tree,
)
from tests.tools.growth import shapes
from tests.tools.shapes import uniform_tree


def rank_path(shape: TreeShape, node: int) -> tuple[int, ...]:
    path: list[int] = []
    while node:
        path.append(shape.ranks[node])
        node = shape.parents[node]
    return tuple(path[::-1])


def rank_paths(shape: TreeShape) -> list[tuple[int, ...]]:
    return [rank_path(shape, node) for node in range(len(shape))]


falling = st.lists(st.floats(0.01, 1), min_size=1, max_size=5).map(
    lambda values: sorted((value / sum(values) for value in values), reverse=True)
)

# -- the record ------------------------------------------------------------------------------------------------------


@given(shapes())
def test_shape_properties_are_consistent(shape: TreeShape) -> None:
    paths = rank_paths(shape)
    assert len(set(paths)) == len(shape)  # a node is identified by its ranks
    assert shape.depths == tuple(map(len, paths))
    children = shape.children()
    assert shape.num_children == tuple(map(len, children))
    assert all([shape.ranks[child] for child in group] == list(range(len(group))) for group in children)
    assert max(shape.ranks) == max(max(path, default=0) for path in paths)
    levels = shape.levels()
    assert sorted(node for level in levels for node in level) == list(range(len(shape)))
    assert all(shape.depths[node] == depth for depth, level in enumerate(levels) for node in level)


@given(shapes(), st.integers(1, 30))
def test_first_keeps_the_first_nodes(shape: TreeShape, size: int) -> None:
    part = shape.first(size)
    assert rank_paths(part) == rank_paths(shape)[:size]


@pytest.mark.parametrize("size", [0, -1])
def test_root_cannot_be_removed(size: int) -> None:
    with pytest.raises(TreeError, match="at least its root"):
        chain_tree(3).first(size)


@pytest.mark.parametrize(
    ("parents", "ranks", "why"),
    [
        ((), (), "at least its root"),
        ((-1, 0), (0,), "differ in length"),
        ((0, 0), (0, 0), "Node 0 must be the root"),
        ((-1, 0), (1, 0), "Node 0 must be the root"),
        ((-1, 0, 2), (0, 0, 0), "Node 2 must come after its parent"),
        ((-1, 0, -1), (0, 0, 0), "Node 2 must come after its parent"),
        ((-1, 0, 0), (0, 0, 2), "Node 2 has the wrong rank"),
        ((-1, 0, 0), (0, 1, 0), "Node 1 has the wrong rank"),
    ],
)
def test_broken_shapes_are_refused(parents: tuple[int, ...], ranks: tuple[int, ...], why: str) -> None:
    with pytest.raises(TreeError, match=why):
        TreeShape(parents, ranks)


# -- builders --------------------------------------------------------------------------------------------------------


def test_chain_and_uniform() -> None:
    assert chain_tree(0) == TreeShape((-1,), (0,))
    assert chain_tree(2) == TreeShape((-1, 0, 1), (0, 0, 0))
    assert uniform_tree(2, 6) == TreeShape((-1, 0, 0, 1, 1, 2), (0, 0, 1, 0, 1, 0))
    assert uniform_tree(1, 4) == chain_tree(3)
    assert len(uniform_tree(3, 1)) == 1


def test_spine_tree_has_chains_next_to_the_spine() -> None:
    shape = spine_tree([2, 0, 1], branch_depth=2)
    below = {(0,), (0, 0), (0, 0, 0), (1,), (1, 0), (2,), (2, 0), (0, 0, 1), (0, 0, 1, 0)}
    assert set(rank_paths(shape)) == {(), *below}


@given(falling, st.integers(1, 12), st.integers(0, 4))
def test_ranked_tree_contains_the_best_nodes(acceptance: list[float], budget: int, max_depth: int) -> None:
    shape = ranked_tree(acceptance, budget, max_depth)
    values = [prod(acceptance[rank] for rank in path) for path in rank_paths(shape)]
    every = [path for depth in range(max_depth + 1) for path in product(range(len(acceptance)), repeat=depth)]
    best = sorted((prod(acceptance[rank] for rank in path) for path in every), reverse=True)[:budget]
    assert values == pytest.approx(best)  # the same values, and in falling order


def test_ties_go_towards_the_root_then_to_the_lower_rank() -> None:
    assert rank_paths(ranked_tree([0.5, 0.5], 4, 3)) == [(), (0,), (1,), (0, 0)]
    assert rank_paths(ranked_tree([1.0, 0.0], 4, 9)) == [(), (0,), (0, 0), (0, 0, 0)]
    assert rank_paths(ranked_tree([0.5, 0.25, 0.25], 5, 9)) == [(), (0,), (1,), (2,), (0, 0)]


def test_a_ranked_tree_refuses_a_rising_acceptance() -> None:
    with pytest.raises(OptionError, match="must not rise") as caught:
        ranked_tree([0.3, 0.2, 0.25], 5, 3)
    assert "rank 2" in str(caught.value)


@pytest.mark.parametrize(
    ("build", "what"),
    [
        (lambda: chain_tree(-1), "length"),
        (lambda: ranked_tree([0.5], 0, 3), "budget"),
        (lambda: ranked_tree([0.5], 3, -1), "depth"),
        (lambda: spine_tree([1], 0), "depth"),
        (lambda: spine_tree([1, -1]), "node 1"),
        (lambda: prune(chain_tree(1), [1, 1], 0), "budget"),
    ],
)
def test_sizes_out_of_range_are_refused(build: object, what: str) -> None:
    with pytest.raises(OptionError, match=what):
        build()  # type: ignore[operator]


def test_the_recycling_tree_is_wider_under_better_ranks() -> None:
    shape = recycling_tree()
    assert (len(shape), max(shape.depths), shape.num_children[0], max(shape.ranks)) == (80, 6, 8, 7)
    for group in shape.children():
        widths = [shape.num_children[child] for child in group]
        assert widths == sorted(widths, reverse=True)
    assert recycling_tree(30) == shape.first(30)


def test_the_initial_tree_is_large_and_deep() -> None:
    shape = initial_tree()
    assert (len(shape), max(shape.depths), shape.num_children[0], max(shape.num_children)) == (625, 20, 10, 10)
    assert len(shape.levels()[2]) > 20
    assert len(initial_tree(1000, 7).levels()) == 8


# -- pruning ---------------------------------------------------------------------------------------------------------


@given(shapes(), st.data())
def test_pruning_keeps_the_most_visited_nodes(shape: TreeShape, data: st.DataObject) -> None:
    counts = [data.draw(st.integers(0, 20), label="visits of the root")]
    for parent in shape.parents[1:]:
        counts.append(data.draw(st.integers(0, counts[parent])))
    budget = data.draw(st.integers(1, len(shape)), label="budget")
    kept = sorted(range(len(shape)), key=lambda node: (-counts[node], shape.depths[node], node))[:budget]
    pruned = prune(shape, counts, budget)
    assert sorted(pruned.depths) == sorted(shape.depths[node] for node in kept)
    number = {node: sum(shape.parents[other] == shape.parents[node] for other in kept if other < node) for node in kept}

    def new_path(node: int) -> tuple[int, ...]:
        return () if node == 0 else (*new_path(shape.parents[node]), number[node])

    assert set(rank_paths(pruned)) == {new_path(node) for node in kept}


def test_pruned_siblings_keep_order_and_get_new_ranks() -> None:
    shape = TreeShape((-1, 0, 0, 0, 3), (0, 0, 1, 2, 0))
    assert prune(shape, [9, 5, 1, 6, 4], 4) == TreeShape((-1, 0, 0, 2), (0, 0, 1, 0))
    assert prune(shape, [9, 5, 1, 6, 4], 9) == TreeShape((-1, 0, 0, 0, 3), (0, 0, 1, 2, 0))
    assert prune(shape, [3, 3, 3, 3, 3], 3) == TreeShape((-1, 0, 0), (0, 0, 1))


def test_counts_must_fit_the_tree() -> None:
    with pytest.raises(TreeError, match="one count per node"):
        prune(chain_tree(2), [1, 1], 2)
    with pytest.raises(TreeError, match="Node 2 was visited more often than its parent"):
        prune(chain_tree(2), [4, 2, 3], 2)


@given(shapes(), st.data())
def test_best_first_only_renumbers_nodes(shape: TreeShape, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.floats(0, 1), min_size=len(shape), max_size=len(shape)))
    assert set(rank_paths(best_first(shape.children(), values))) == set(rank_paths(shape))


# -- files -----------------------------------------------------------------------------------------------------------


def test_shape_round_trips_through_file(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    recycling_tree().save(path, model="tiny", prompts=3)
    chain_tree(4).save(path, note="über")  # replaces the first
    assert TreeShape.load(path) == (chain_tree(4), {"note": "über"})
    assert json.loads(path.read_text(encoding="utf-8"))["format"] == FORMAT
    assert [file.name for file in tmp_path.iterdir()] == ["tree.json"]


def test_failed_save_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    chain_tree(1).save(path)
    with pytest.raises(TypeError):
        chain_tree(2).save(path, about_what=object())
    with pytest.raises(DraftwoodError, match="cannot be written"):
        chain_tree(2).save(path / "inside a file" / "tree.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DraftwoodError, match="cannot be written"):
        chain_tree(2).save(tmp_path / "folder")
    assert TreeShape.load(path)[0] == chain_tree(1)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["folder", "tree.json"]


GOOD = {"format": FORMAT, "version": VERSION, "parents": [-1, 0], "ranks": [0, 0], "about": {}}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("no json", "not valid JSON"),
        ("\ud800".encode("utf-8", "surrogatepass"), "not valid JSON"),
        ("[1, 2]", "is not a tree shape"),
        ({**GOOD, "format": "other"}, "is not a tree shape"),
        ({}, "is not a tree shape"),
        ({**GOOD, "version": 2}, "another version"),
        ({**GOOD, "parents": [-1, 1]}, "Node 1 must come after its parent"),
        ({**GOOD, "ranks": [0, 1]}, "Node 1 has the wrong rank"),
        ({**GOOD, "ranks": [0]}, "differ in length"),
        ({**GOOD, "parents": [-1, 0.0]}, "'parents' of node 1 is not an integer"),
        ({**GOOD, "ranks": [False, 0]}, "'ranks' of node 0 is not an integer"),
        ({**GOOD, "parents": "x"}, "'parents' must be a list"),
        ({key: value for key, value in GOOD.items() if key != "ranks"}, "'ranks' must be a list"),
        ({**GOOD, "about": 3}, "'about'"),
    ],
)
def test_other_files_are_refused(content: object, why: str, tmp_path: Path) -> None:
    path = tmp_path / "tree.json"
    text = content if isinstance(content, (str, bytes)) else json.dumps(content)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(OptionError, match=why) as caught:
        TreeShape.load(path)
    assert str(path) in str(caught.value)
    assert caught.value.next_step


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read") as caught:
        TreeShape.load(tmp_path / "tree.json")
    assert caught.value.next_step


@given(st.integers(1, 60), st.integers(0, 6))
def test_shape_limited_to_depth(size: int, depth: int) -> None:
    shape = recycling_tree(80).first(size)
    part = shape.limit_depth(depth)
    kept = [node for node, own in enumerate(shape.depths) if own <= depth]
    assert part.ranks == tuple(shape.ranks[node] for node in kept)
    assert part.depths == tuple(shape.depths[node] for node in kept)
    assert shape.limit_depth(max(shape.depths)) == shape
