"""Trees that are filled by drawing: the distribution of draws, exactness of the output, and the resulting shape."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pytest
import torch

from draftwood.growth.drawn import (
    GumbelNoise,
    choose_best,
    fill_drawn,
    make_draw,
    make_gumbel_draw,
    make_multinomial_draw,
)
from draftwood.sampling import Randomness
from draftwood.sources.ngrams import NgramTables
from draftwood.tree import DraftTree
from draftwood.tree.shapes import TreeShape, recycling_tree
from draftwood.verify import accept_sampled
from tests.tools.enumeration import PAIRS, Case, Shape, assert_fits, joint_law, law_error, outcomes
from tests.tools.shapes import uniform_tree

# -- drawing ---------------------------------------------------------------------------------------------------------


class Scripted:
    """Replaces numpy's generator to enumerate every outcome."""

    def __init__(self, chance: Randomness) -> None:
        self._chance = chance

    def choice(self, size: int, p: np.ndarray) -> int:
        assert len(p) == size
        assert p.sum() == pytest.approx(1.0)
        return self._chance.draw(torch.from_numpy(p))


class CaseRows:
    """The drafter's distributions in a case, by path."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def rows(self, contexts: Sequence[tuple[int, ...]]) -> tuple[list[int], np.ndarray, np.ndarray]:
        probs = np.array([self._case.probs(context)[1] for context in contexts], dtype=np.float32)
        order = np.argsort(-probs, axis=1, kind="stable")
        probs = np.take_along_axis(probs, order, axis=1)
        return list(range(len(contexts))), np.where(probs > 0.0, order, -1).astype(np.int32), probs

    def extend_context(self, context: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*context, token)


class FilledCase(Case):
    """A case whose trees are grown by ``fill_drawn``, token by token."""

    def draft(self, shape: Shape, kind: str, chance: Randomness, forget: bool = False) -> DraftTree:
        draw = make_multinomial_draw(Scripted(chance)) if kind == "drawn" else choose_best  # type: ignore[arg-type]
        return fill_drawn(flat(shape), 100, 0, (), CaseRows(self), draw, "ngram")


def flat(shape: Shape) -> TreeShape:
    """A shape of the enumeration in the other notation, breadth first."""
    parents, ranks, nodes = [-1], [0], [shape]
    for node, below in enumerate(nodes):
        for rank, child in enumerate(below):
            parents.append(node)
            ranks.append(rank)
            nodes.append(child)
    return TreeShape(tuple(parents), tuple(ranks))


SHAPES: list[Shape] = [((),), ((), ()), ((), (), ()), (((),),), (((),), ()), (((), ()), ()), (((),), ((),))]


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("kind", ["drawn", "chosen"])
def test_output_is_exact_by_enumeration(pair: str, kind: str) -> None:
    for shape in SHAPES:
        case = FilledCase(pair)
        assert law_error(case, shape, joint_law(case, shape, kind, accept_sampled)) < 1e-6, shape


def test_enumeration_detects_another_order() -> None:
    """The control: drawn children that are tried best first instead of in draw order are not exact."""

    class Sorted(FilledCase):
        def draft(self, shape: Shape, kind: str, chance: Randomness, forget: bool = False) -> DraftTree:
            tree = super().draft(shape, kind, chance, forget)
            ids, probs = tree.proposals[0]
            worth = dict(zip(ids.tolist(), probs.tolist(), strict=True))
            tokens = sorted(tree.tokens[1:], key=lambda token: -worth[token])
            return DraftTree(
                (0, *tokens), tree.parents, tree.depths, tree.sources, tree.probs, tree.proposals, tree.num_chosen
            )

    shape: Shape = ((), (), ())
    errors = [
        law_error(case, shape, joint_law(case, shape, "drawn", accept_sampled))
        for case in (Sorted("independent", seed=seed) for seed in range(3))
    ]
    assert max(errors) > 1e-3


def sequential_law(probs: Sequence[float], count: int) -> dict[tuple[int, ...], float]:
    """The distribution of ``count`` sequential draws without replacement."""
    law = {}
    for draw in permutations([entry for entry, prob in enumerate(probs) if prob > 0.0], count):
        weight, left = 1.0, 1.0
        for entry in draw:
            weight *= probs[entry] / left
            left -= probs[entry]
        law[draw] = weight
    return law


Q = (0.55, 0.3, 0.1, 0.05)


@pytest.mark.parametrize("count", [2, 3])
def test_drawing_in_turn_is_sequential_by_enumeration(count: int) -> None:
    rows = np.array([Q], dtype=np.float32)
    law: dict[tuple[int, ...], float] = defaultdict(float)
    for drawn, weight in outcomes(lambda chance: make_multinomial_draw(Scripted(chance))(rows, [count])[0]):  # type: ignore[arg-type]
        law[tuple(drawn)] += weight
    expected = sequential_law(Q, count)
    assert law.keys() == expected.keys()
    assert all(law[draw] == pytest.approx(expected[draw], abs=1e-6) for draw in expected)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("mode", ["gumbel", "multinomial"])
def test_drawing_matches_sequential_distribution_statistically(mode: str, count: int) -> None:
    runs = 12_000 if mode == "gumbel" else 3_000
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(6):
        draw = make_draw(mode, np.random.default_rng([seed, count]))
        rows = np.array([Q] * 50, dtype=np.float32)
        for _ in range(runs // 300):
            seen.update(tuple(order[:count]) for order in draw(rows, [count] * 50))
    assert_fits(seen, sequential_law(Q, count))


def test_rows_of_one_level_are_drawn_independently() -> None:
    """The first draws of two nodes have the product distribution."""
    draw = make_draw("gumbel", np.random.default_rng(3))
    rows = np.array([Q, Q], dtype=np.float32)
    seen = Counter((a[0], b[0]) for a, b in (draw(rows, [1, 1]) for _ in range(6000)))
    assert_fits(seen, {(a, b): Q[a] * Q[b] for a in range(4) for b in range(4)})


def test_noise_is_never_used_twice() -> None:
    noise = GumbelNoise(np.random.default_rng(0), block=64)
    taken = np.concatenate([noise.take(rows, 10).ravel() for rows in (1, 3, 2, 5, 9, 1, 1)])
    assert len(taken) == 220
    assert len(set(taken.tolist())) == 220


def test_zero_probability_tokens_are_never_drawn() -> None:
    rows = np.array([[1e-38, 1e-45, 0.0, 0.0]] * 200, dtype=np.float32)
    for draw in (
        make_gumbel_draw(GumbelNoise(np.random.default_rng(0))),
        make_multinomial_draw(np.random.default_rng(0)),
    ):
        assert all(set(order[:2]) == {0, 1} for order in draw(rows, [2] * 200))


# -- filling ---------------------------------------------------------------------------------------------------------


def tables_with(rows: dict[tuple[int, ...], dict[int, float]], width: int = 4) -> NgramTables:
    tables = NgramTables(50, 2, width)
    for text, row in rows.items():
        ids, probs = [*row, *[-1] * (width - len(row))], [*row.values(), *[0.0] * (width - len(row))]
        contexts = [tables.context(text)]
        tables.learn(contexts, np.array([ids], dtype=np.int32), np.array([probs], dtype=np.float32))
    return tables


def test_shape_is_filled_where_contexts_are_known() -> None:
    tables = tables_with({(1,): {2: 0.5, 3: 0.25}, (1, 2): {4: 1.0}, (3,): {5: 0.75, 6: 0.25}})
    shape = uniform_tree(3, 13)
    for mode in ("gumbel", "multinomial", "chosen"):
        for seed in range(5):
            draw = make_draw(mode, np.random.default_rng(seed))
            tree = fill_drawn(shape, 13, 1, tables.context([1]), tables, draw, "ngram")
            below = {tree.tokens[node]: set(tree.path_tokens(node)) for node in range(len(tree))}
            assert below == {1: set(), 2: {2}, 3: {3}, 4: {2, 4}, 5: {3, 5}, 6: {3, 6}}
            assert tree.sources == ("root", *["ngram"] * 5)
            if mode == "chosen":
                assert not tree.proposals
                assert dict(zip(tree.tokens, tree.probs, strict=True))[2] == pytest.approx(2 / 3)
            else:
                assert tree.proposals[0].token_ids.tolist() == [2, 3]
                assert tree.proposals[0].probs == pytest.approx([2 / 3, 1 / 3])
                assert len(tree.proposals) == 3
                ranks = [tree.children_of(parent).index(node) for node, parent in enumerate(tree.parents) if node]
                assert list(tree.probs[1:]) == [1.0 / (1.0 + rank) for rank in ranks]


def test_the_shape_is_cut_before_anything_is_drawn() -> None:
    tables = tables_with({(1,): {2: 0.25, 3: 0.25, 4: 0.25, 5: 0.25}})
    for size in (1, 2, 4):
        draw = make_draw("gumbel", np.random.default_rng(0))
        tree = fill_drawn(uniform_tree(4, 5), size, 1, tables.context([1]), tables, draw, "ngram")
        full = fill_drawn(
            uniform_tree(4, 5),
            5,
            1,
            tables.context([1]),
            tables,
            make_draw("gumbel", np.random.default_rng(0)),
            "ngram",
        )
        assert tree.tokens == full.tokens[:size]


def test_unknown_context_and_empty_row_give_root_only() -> None:
    tables = tables_with({(1,): {2: 0.0}})
    for mode in ("gumbel", "multinomial", "chosen"):
        draw = make_draw(mode, np.random.default_rng(0))
        for root in (1, 9):
            tree = fill_drawn(recycling_tree(), 80, root, tables.context([root]), tables, draw, "ngram")
            assert tree.tokens == (root,)
            assert not tree.proposals
