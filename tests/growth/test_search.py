"""Trees of searches that were run elsewhere, against the growth that chooses nodes itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.compiled import load_core
from draftwood.growth.drawn import make_draw
from draftwood.growth.neural import GrowthOptions, make_growth
from draftwood.growth.neural import search as search_module
from draftwood.growth.neural.base import Growth
from draftwood.growth.neural.search import Search
from draftwood.targets import Found
from draftwood.tree import DraftTree, TreeShape

needs_core = pytest.mark.skipif(load_core() is None, reason="no compiler")
ROOT = 7
GROWTHS = ("beam", "optimal", "salf", "chain", "static")


class Table:
    """A draft model: the successors of a token and depth, best first. ``tied``: many chances are 1 or equal."""

    def __init__(self, seed: int, k: int, *, tied: bool = False) -> None:
        self._seed, self._k, self._tied = seed, k, tied

    def row(self, token: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng((self._seed, token, depth))
        chances = 0.5 ** rng.integers(0, 3, self._k) if self._tied else rng.random(self._k)
        return rng.permutation(50)[: self._k].astype(np.int32), np.sort(chances)[::-1].astype(np.float32)


def run_search(table: Table, search: Search) -> tuple[np.ndarray, ...]:
    """What targets/searches.py describes, in Python: tokens, probs, values, picks, depths."""
    width, k = search.width, search.top_k
    size = (search.passes + 1) * width
    tokens, probs = np.zeros((size, k), np.int32), np.zeros((size, k), np.float32)
    values, picks = np.zeros((size, k), np.float32), np.full(size, -1, np.int32)
    depths, ran = np.zeros(size, np.int32), {0}
    own, turn = [(0, ROOT, 1.0)], 0  # node, token, value
    while True:
        for node, token, value in own:
            ids, chances = table.row(token, int(depths[node]))
            tokens[node], probs[node], values[node] = ids[:k], chances[:k], value * chances[:k]
        if turn == search.passes:
            break
        turn += 1
        known = np.sort(values[values > 0])[::-1]
        level = ran if search.anywhere else {node for node, _, _ in own}
        candidates = [node * k + rank for node in level for rank in range(k) if depths[node] + 1 < search.depth]
        ranked = [(-values.flat[c], c) for c in candidates if values.flat[c] > 0 and c not in picks]
        if search.anywhere:
            ranked = [(value, c) for value, c in ranked if np.count_nonzero(known >= -value) < search.spec.budget - 1]
        if search.shape is not None:
            wishes = search.shape.picks[turn * width : (turn + 1) * width]
            chosen = [next((item for item in ranked if item[1] == wish), None) for wish in wishes]
        else:
            chosen = sorted(ranked)[:width]
        if search.threshold is not None:
            total = sum(-item[0] for item in chosen)
            if not total or total < search.threshold:
                break
        own = []
        for place, item in enumerate(chosen):
            if item is not None:
                node = turn * width + place
                picks[node], depths[node] = item[1], depths[item[1] // k] + 1
                own.append((node, int(tokens.flat[item[1]]), -item[0]))
                ran.add(node)
    return tokens.ravel(), probs.ravel(), values.ravel(), picks, depths


def grow(table: Table, growth: Growth) -> DraftTree:
    """The tree that grows pass by pass."""
    paths = []  # token and depth of every expansion
    while (frontier := growth.frontier()) is not None:
        rows = []
        for token, parent in zip(frontier.tokens, frontier.parents, strict=True):
            depth = 0 if parent < 0 else paths[parent] + 1
            paths.append(depth)
            rows.append(table.row(token, depth))
        ids, probs = (np.stack(parts)[:, : growth.width] for parts in zip(*rows, strict=True))
        growth.grow(ids, probs)
    return growth.tree()


@st.composite
def shapes(draw: st.DrawFn) -> TreeShape:
    parents, ranks, counts = [-1], [0], [0]
    for _ in range(draw(st.integers(1, 12))):
        parent = draw(st.sampled_from([node for node, count in enumerate(counts) if count < 4]))
        parents.append(parent)
        ranks.append(counts[parent])
        counts[parent] += 1
        counts.append(0)
    return TreeShape(tuple(parents), tuple(ranks))


SIZES = {
    "seed": st.integers(0, 500),
    "width": st.integers(1, 5),
    "depth": st.integers(2, 5),
    "budget": st.integers(2, 40),
    "shape": shapes(),
}


@pytest.mark.parametrize("name", GROWTHS)
@given(**SIZES)
def test_the_tree_of_a_search_is_the_tree_that_grows(
    name: str, seed: int, width: int, depth: int, budget: int, shape: TreeShape
) -> None:
    table = Table(seed, 5)
    options = GrowthOptions(depth=depth, top_k=width, batch=max(width - 1, 1), threshold=0.3, shape=shape)
    growth = make_growth(name, ROOT, budget, options, tag="head")
    search = growth.search
    assert search is not None
    tokens, probs, values, picks, depths = run_search(table, search)
    order = search.order(values)
    tree = search.tree(order, tokens, probs, picks, depths)
    grown = grow(table, growth)
    assert (tree.tokens, tree.parents, tree.depths) == (grown.tokens, grown.parents, grown.depths)
    assert tree.sources == grown.sources
    assert tree.probs == pytest.approx(grown.probs)
    expansions = search.expansions(order, picks)
    assert [number >= 0 for number, known in zip(expansions, growth.expansion_of, strict=True) if known >= 0] == [
        True
    ] * sum(known >= 0 for known in growth.expansion_of)
    run = [number for number in expansions if number >= 0]
    assert len(set(run)) == len(run)


def record(search: Search, parts: tuple[np.ndarray, ...], tree: int, num_trees: int) -> Found:
    """What ``run_search`` returns, as the records of one of several trees; those of the others are noise."""
    rng = np.random.default_rng(tree)
    columns = []
    for part in parts:
        rows = part.view(np.int32).reshape(search.passes + 1, 1, -1)
        all_trees = rng.integers(0, 1 << 30, (len(rows), num_trees, rows.shape[2])).astype(np.int32)
        all_trees[:, tree : tree + 1] = rows
        columns.append(all_trees.reshape(len(rows), -1))
    return Found(np.concatenate(columns, axis=1), num_trees, tree, search.width, search.top_k)


@needs_core
@pytest.mark.parametrize("name", GROWTHS)
@given(**SIZES, tree=st.integers(0, 2), tied=st.booleans(), has_names=st.booleans())
def test_c_builds_the_same_tree(
    name: str, seed: int, width: int, depth: int, budget: int, shape: TreeShape, tree: int, tied: bool, has_names: bool
) -> None:
    options = GrowthOptions(depth=depth, top_k=width, batch=max(width - 1, 1), threshold=0.3, shape=shape)
    search = make_growth(name, ROOT, budget, options, tag="head").search
    assert search is not None
    parts = run_search(Table(seed, 5, tied=tied), search)
    found = record(search, parts, tree, num_trees=3)
    if has_names:
        found = found._replace(names=np.random.default_rng(seed).permutation(50).astype(np.int32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_module, "load_core", lambda: None)
        expected = search.build(found)
    built = search.build(found)
    assert built.tree == expected.tree
    assert list(built.order) == list(expected.order)
    assert search.expansions(built.order, found.picks) == search.expansions(expected.order, found.picks)
    if not has_names:
        assert found.tokens.tolist() == parts[0].tolist()


@pytest.mark.parametrize("name", ["beam", "optimal", "salf"])
@given(**SIZES)
def test_parents_come_first_among_equals(
    name: str, seed: int, width: int, depth: int, budget: int, shape: TreeShape
) -> None:
    growth = make_growth(name, ROOT, budget, GrowthOptions(depth=depth, top_k=width, batch=width, threshold=0.0))
    assert growth.search is not None
    tokens, probs, values, picks, depths = run_search(Table(seed, width, tied=True), growth.search)
    tree = growth.search.tree(growth.search.order(values), tokens, probs, picks, depths)
    assert 1 < len(tree) <= budget
    for node, parent in enumerate(tree.parents):
        assert parent < node
        assert node == 0 or tree.depths[node] == tree.depths[parent] + 1


@pytest.mark.parametrize("name", GROWTHS)
def test_drawn_trees_are_not_searches(name: str) -> None:
    shape = TreeShape((-1, 0, 0), (0, 0, 1))
    options = GrowthOptions(depth=3, top_k=2, shape=shape)
    draw = make_draw("gumbel", np.random.default_rng(1))
    assert make_growth(name, 1, 9, options, draw).search is None
