"""Growth with neural sources: optimal trees, early stops, and bookkeeping. Exactness of drawn trees:
test_growth_neural_drawn.py."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.errors import OptionError
from draftwood.growth.drawn import choose_best, make_draw
from draftwood.growth.neural.policies import GROWTHS, Growth, GrowthOptions, make_growth
from draftwood.growth.neural.ranked import SearchGrowth
from draftwood.tree import DraftTree
from draftwood.tree.shapes import TreeShape
from tests.tools.growth import ROOT, Distribution, Drafted, Path, distributions, drafted, growth_of, neural_rows, shapes

EXAMPLES = settings(max_examples=100, deadline=None)


def search(name: str, budget: int, **options: Any) -> SearchGrowth:
    growth = growth_of(name, budget, **options)
    assert isinstance(growth, SearchGrowth)
    return growth


def values_of(tree: DraftTree) -> dict[Path, float]:
    """Path probabilities of the tree's nodes, without the root."""
    values = [1.0]
    for parent, prob in zip(tree.parents[1:], tree.probs[1:], strict=True):
        values.append(values[parent] * prob)
    return {tuple(tree.path_tokens(node)): values[node] for node in range(1, len(tree))}


def all_values(vocab: int, after: Distribution, depth: int) -> dict[Path, float]:
    """Probabilities of all paths down to a depth."""
    return {
        path: math.prod(float(after(path[:end])[path[end]]) for end in range(length))
        for length in range(1, depth + 1)
        for path in product(range(vocab), repeat=length)
    }


# -- the best tree ---------------------------------------------------------------------------------------------------


@given(distributions(), st.integers(1, 30), st.integers(1, 4), st.integers(1, 12))
@EXAMPLES
def test_optimal_growth_finds_the_best_tree(
    source: tuple[int, Distribution], budget: int, depth: int, batch: int
) -> None:
    vocab, after = source
    tree = drafted(growth_of("optimal", budget, top_k=vocab, depth=depth, batch=batch), after).tree
    every = {path: value for path, value in all_values(vocab, after, depth).items() if value > 0.0}
    best = sorted(every.values(), reverse=True)[: budget - 1]
    found = values_of(tree)
    assert found == {path: every[path] for path in found}
    assert sorted(found.values(), reverse=True) == best  # ties may be resolved in any way, but their number is fixed
    assert {path for path, value in every.items() if best and value > best[-1]} <= set(found)


@given(distributions(), st.integers(2, 40), st.floats(0.0, 1.2), st.integers(1, 10))
@EXAMPLES
def test_sums_never_rise(source: tuple[int, Distribution], budget: int, threshold: float, batch: int) -> None:
    vocab, after = source
    growth = search("salf", budget, threshold=threshold, batch=batch, top_k=vocab, depth=12)
    passes = drafted(growth, after).passes
    assert all(one + 1e-6 >= other for one, other in pairwise(growth.sums))
    assert all(total >= threshold for total in growth.sums[1:-1])
    assert growth.sums[-1] < threshold or growth.sums[-1] == 0.0
    assert len(growth.sums) == len(passes) + 1


def listing(after: Distribution, vocab: int, size: int, batch: int, threshold: float) -> tuple[list[float], set[Path]]:
    """The paper's listing, step by step: its sums, and the nodes taken from the queue, root included."""
    kept: list[tuple[float, Path]] = []
    queue: list[tuple[float, Path]] = [(1.0, ())]
    sums = []
    while True:
        popped, queue = queue[:batch], queue[batch:]
        kept = sorted([*kept, *popped], key=lambda pair: -pair[0])[:size]
        least = kept[-1][0] if len(kept) == size else 0.0
        rest = [pair for pair in popped if pair[0] > least]
        sums.append(sum(value for value, _ in rest))
        if not rest or sums[-1] < threshold:
            return sums, {path for _, path in kept}
        for value, path in rest:
            queue += [(value * float(after(path)[token]), (*path, token)) for token in range(vocab)]
        queue = sorted(queue, key=lambda pair: -pair[0])[:size]


@given(distributions(ties=False, max_vocab=12), st.integers(3, 30), st.data())
@EXAMPLES
def test_search_matches_the_paper(source: tuple[int, Distribution], budget: int, data: st.DataObject) -> None:
    vocab, after = source
    batch, threshold = data.draw(st.integers(1, budget - 1)), data.draw(st.sampled_from([0.0, 0.3, 0.6, 0.9]))
    growth = search("salf", budget, threshold=threshold, batch=batch, top_k=vocab)
    tree = drafted(growth, after).tree
    sums, kept = listing(after, vocab, budget, batch, threshold)
    assert growth.sums == pytest.approx(sums)
    if threshold == 0.0:
        assert {*values_of(tree), ()} == kept
    else:  # and nodes still in the queue
        assert len(tree) >= len(kept)
        assert sum(values_of(tree).values()) >= sum(math.prod(steps(after, path)) for path in kept if path) - 1e-9


def steps(after: Distribution, path: Path) -> Iterator[float]:
    return (float(after(path[:end])[token]) for end, token in enumerate(path))


@given(distributions(), st.integers(1, 40), st.integers(1, 12))
@EXAMPLES
def test_growth_without_threshold_is_optimal(source: tuple[int, Distribution], budget: int, batch: int) -> None:
    _, after = source
    one = search("salf", budget, threshold=0.0, batch=batch, depth=8)
    other = search("optimal", budget, batch=batch, depth=8)
    assert drafted(one, after) == drafted(other, after)
    assert one.sums == other.sums


@given(distributions(), st.integers(2, 40), st.integers(1, 10))
@EXAMPLES
def test_threshold_stops_early_at_bounded_cost(source: tuple[int, Distribution], budget: int, batch: int) -> None:
    """Each saved pass would have added nodes of at most that sum."""
    vocab, after = source
    one = search("salf", budget, batch=batch, top_k=vocab, depth=8)
    other = search("optimal", budget, batch=batch, top_k=vocab, depth=8)
    stopped, whole = drafted(one, after), drafted(other, after)
    assert one.sums == other.sums[: len(one.sums)]
    assert stopped.passes == whole.passes[: len(stopped.passes)]
    lost = sum(values_of(whole.tree).values()) - sum(values_of(stopped.tree).values())
    assert -1e-6 <= lost <= sum(other.sums[len(stopped.passes) :]) + 1e-6


@given(distributions(), st.integers(2, 30), st.integers(1, 5), st.integers(1, 4))
@EXAMPLES
def test_beam_growth_expands_the_best_of_every_level(
    source: tuple[int, Distribution], budget: int, depth: int, top_k: int
) -> None:
    """As in EAGLE-2, without optimizations. Sums are compared, because ties may be resolved
    differently, so only one level may follow them."""
    vocab, after = source
    tree = drafted(growth_of("beam", budget, depth=depth, top_k=top_k), after).tree
    known: list[tuple[float, Path]] = []
    level: list[tuple[float, Path]] = [(1.0, ())]
    for _ in range(depth):
        below = []
        for value, path in level:
            row, probs = neural_rows(after, [path], min(top_k, vocab))
            pairs = zip(row[0].tolist(), probs[0].tolist(), strict=True)
            below += [(value * prob, (*path, token)) for token, prob in pairs if prob > 0.0]
        known += below
        level = sorted(below, key=lambda pair: -pair[0])[:top_k]
    best = sorted((value for value, _ in known), reverse=True)[: budget - 1]
    assert sorted(values_of(tree).values(), reverse=True) == pytest.approx(best)


@given(distributions(), st.integers(2, 40), st.integers(1, 5))
@EXAMPLES
def test_beam_is_never_better_than_optimal_growth(source: tuple[int, Distribution], budget: int, top_k: int) -> None:
    _, after = source
    beam = drafted(growth_of("beam", budget, depth=6, top_k=top_k), after).tree
    optimal = drafted(growth_of("optimal", budget, depth=6, top_k=4), after).tree
    assert sum(values_of(beam).values()) <= sum(values_of(optimal).values()) + 1e-12


def test_default_depths_match_the_paper() -> None:
    def after(path: Path) -> np.ndarray:
        return np.array([0.9, 0.1], dtype=np.float32)

    assert drafted(growth_of("beam", 61), after).passes == [1, 2, 4, 8, 10, 10, 10]
    assert max(drafted(growth_of("beam", 61), after).tree.depths) == 7
    assert max(drafted(growth_of("optimal", 61), after).tree.depths) > 12
    assert max(drafted(growth_of("optimal", 61, depth=3), after).tree.depths) == 3
    assert len(drafted(growth_of("salf", 61), after).passes) < len(drafted(growth_of("optimal", 61), after).passes)


# -- known shapes ----------------------------------------------------------------------------------------------------


@given(distributions(), st.integers(1, 10), st.one_of(st.none(), st.integers(1, 12)))
@EXAMPLES
def test_a_chain_follows_the_best_token(source: tuple[int, Distribution], budget: int, depth: int | None) -> None:
    _, after = source
    result = drafted(growth_of("chain", budget, depth=depth), after)
    path: list[int] = []
    while len(path) < min(7 if depth is None else depth, budget - 1) and after(tuple(path)).any():
        path.append(int(after(tuple(path)).argmax()))
    assert result.tree.tokens == (ROOT, *path)
    assert result.tree.parents == tuple(range(-1, len(path)))
    assert set(result.passes) <= {1}
    assert len(result.passes) <= min(7 if depth is None else depth, max(budget - 1, 0))


@given(distributions(), shapes(), st.integers(1, 25))
@EXAMPLES
def test_a_shape_is_filled_by_rank(source: tuple[int, Distribution], shape: TreeShape, budget: int) -> None:
    _, after = source
    result = drafted(growth_of("static", budget, shape=shape), after)
    part = shape.first(budget)
    paths: dict[int, Path] = {0: ()}
    for place, (parent, rank) in enumerate(zip(part.parents[1:], part.ranks[1:], strict=True), start=1):
        if parent in paths:
            row = neural_rows(after, [paths[parent]], 9)[0][0].tolist()
            if rank < len(row) and row[rank] >= 0:
                paths[place] = (*paths[parent], row[rank])
    assert [tuple(result.tree.path_tokens(node)) for node in range(len(result.tree))] == list(paths.values())
    assert len(result.passes) <= max(part.depths)


# -- every policy ----------------------------------------------------------------------------------------------------


def assert_valid(result: Drafted, growth: Growth, budget: int) -> None:
    tree, expanded, _ = result
    DraftTree(tree.tokens, tree.parents, tree.depths, tree.sources, tree.probs, tree.proposals)  # validates the tree
    assert 1 <= len(tree) <= max(budget, 1)
    assert tree.sources == ("root", *["draft"] * (len(tree) - 1))
    assert all(0.0 < prob <= 1.0 for prob in tree.probs)
    for siblings in tree.children():
        probs = [tree.probs[node] for node in siblings]
        assert probs == sorted(probs, reverse=True)
    assert len(set(expanded)) == len(expanded)
    known = {path: number for number, path in enumerate(expanded)}
    assert growth.expansion_of == [known.get(tuple(tree.path_tokens(node)), -1) for node in range(len(tree))]
    inner = {node for node, children in enumerate(tree.children()) if children}
    assert set(tree.proposals) == (inner if growth.is_drawn else set())
    for proposal in tree.proposals.values():
        assert proposal.probs.min() > 0.0
        assert proposal.probs.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("name", GROWTHS)
@pytest.mark.parametrize("mode", ["chosen", "gumbel", "multinomial"])
@given(distributions(), st.sampled_from([0, 1, 2, 3, 7, 30, 61]), st.sampled_from([None, 0, 1, 3]), st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_trees_and_node_numbers_are_valid(
    mode: str, name: str, source: tuple[int, Distribution], budget: int, depth: int | None, top_k: int
) -> None:
    draw = make_draw(mode, np.random.default_rng(budget))
    growth = growth_of(name, budget, draw, depth=depth, top_k=top_k, support=3, batch=top_k)
    result = drafted(growth, source[1])
    assert_valid(result, growth, budget)
    if depth is not None and name != "static":
        assert max(result.tree.depths) <= depth
    if budget < 2:
        assert not result.passes


@pytest.mark.parametrize("name", GROWTHS)
@given(distributions(), st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_extra_entries_do_not_change_the_tree(name: str, source: tuple[int, Distribution], top_k: int) -> None:
    one, other = (drafted(growth_of(name, 20, top_k=top_k), source[1], unasked=unasked) for unasked in (0, 2))
    assert one == other


@pytest.mark.parametrize("name", GROWTHS)
@given(distributions(), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_growth_can_end_at_any_time(name: str, source: tuple[int, Distribution], num_passes: int) -> None:
    growth = growth_of(name, 20)
    assert_valid(drafted(growth, source[1], num_passes), growth, 20)


@pytest.mark.parametrize("mode", ["chosen", "gumbel"])
@pytest.mark.parametrize("name", GROWTHS)
def test_invalid_rows_and_tokens_are_skipped(name: str, mode: str) -> None:
    """Short rows, NaN rows, invalid tokens, and probabilities above 1 by rounding."""
    growth = growth_of(name, 30, make_draw(mode, np.random.default_rng(0)), support=4)
    rows = [([5, -1, 6, 7], [1.0001, 0.5, 1e-6, 0.0]), ([1, 2, 3, 4], [math.nan] * 4), ([1, 2, 3, 4], [0.0] * 4)]
    passes = 0
    while (frontier := growth.frontier()) is not None:
        size = len(frontier.tokens)
        ids, probs = zip(*[rows[min(passes, 1 + number % 2)] for number in range(size)], strict=True)
        growth.grow(np.array(ids, dtype=np.int32), np.array(probs, dtype=np.float32))
        passes += 1
    tree = growth.tree()
    assert set(tree.tokens) <= {ROOT, 5, 6}
    assert ROOT in tree.tokens
    assert len(tree) == (2 if name == "chain" else 3)
    if mode == "chosen":
        assert tree.probs[1] == 1.0


def test_unknown_names_and_missing_shapes_are_refused() -> None:
    for draw in (choose_best, make_draw("gumbel", np.random.default_rng(0))):
        with pytest.raises(OptionError, match="Unknown growth"):
            make_growth("bushy", 1, 10, GrowthOptions(), draw)
        with pytest.raises(OptionError, match="needs a shape"):
            make_growth("static", 1, 10, GrowthOptions(), draw)
