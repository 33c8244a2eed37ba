"""Trees of beams that were run elsewhere, against the growth that chooses nodes itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.growth.neural import GrowthOptions, make_growth


class Table:
    """A draft model: the successors of a token and depth, best first. ``tied``: many chances are 1 or equal."""

    def __init__(self, seed: int, k: int, *, tied: bool = False) -> None:
        self._seed, self._k, self._tied = seed, k, tied

    def rows(self, tokens: list[int], depth: int) -> tuple[np.ndarray, np.ndarray]:
        ids, probs = [], []
        for token in tokens:
            rng = np.random.default_rng((self._seed, token, depth))
            ids.append(rng.permutation(50)[: self._k])
            chances = 0.5 ** rng.integers(0, 3, self._k) if self._tied else rng.random(self._k)
            probs.append(np.sort(chances)[::-1])
        return np.array(ids, np.int32), np.array(probs, np.float32)


def run_beam(table: Table, root: int, width: int, k: int, passes: int) -> tuple[np.ndarray, ...]:
    """What targets/beams.py describes, in Python."""
    size = (passes + 1) * width
    tokens, probs = np.zeros((size, k), np.int32), np.zeros((size, k), np.float32)
    values, picks = np.zeros((size, k), np.float32), np.full(size, -1, np.int32)
    own = [(0, root, 1.0)]  # node, token, value
    for turn in range(passes + 1):
        for node, token, value in own:
            ids, chances = table.rows([token], turn)
            tokens[node], probs[node], values[node] = ids[0], chances[0], value * chances[0]
        level = [
            (-values[node, rank], node * k + rank) for node, _, _ in own for rank in range(k) if values[node, rank]
        ]
        own = []
        for place, (value, candidate) in enumerate(sorted(level)[:width] if turn < passes else []):
            node = (turn + 1) * width + place
            picks[node] = candidate
            own.append((node, int(tokens.flat[candidate]), -value))
    return tokens.ravel(), probs.ravel(), values.ravel(), picks


SIZES = {
    "seed": st.integers(0, 500),
    "width": st.integers(1, 5),
    "depth": st.integers(2, 5),
    "budget": st.integers(2, 40),
}


@given(**SIZES)
def test_the_tree_of_a_beam_is_the_tree_that_grows(seed: int, width: int, depth: int, budget: int) -> None:
    table = Table(seed, width)
    growth = make_growth("beam", 7, budget, GrowthOptions(depth=depth, top_k=width), tag="head")
    assert growth.beam is not None
    tree = growth.beam.tree(*run_beam(table, 7, width, width, depth - 1))
    level = 0
    while (frontier := growth.frontier()) is not None:
        ids, probs = table.rows(list(frontier.tokens), level)
        growth.grow(ids[:, : growth.width], probs[:, : growth.width])
        level += 1
    grown = growth.tree()
    assert (tree.tokens, tree.parents, tree.depths) == (grown.tokens, grown.parents, grown.depths)
    assert tree.sources == grown.sources
    assert tree.probs == pytest.approx(grown.probs)


@given(**SIZES)
def test_parents_come_first_among_equals(seed: int, width: int, depth: int, budget: int) -> None:
    growth = make_growth("beam", 7, budget, GrowthOptions(depth=depth, top_k=width))
    assert growth.beam is not None
    tree = growth.beam.tree(*run_beam(Table(seed, width, tied=True), 7, width, width, depth - 1))
    assert 1 < len(tree) <= budget
    for node, parent in enumerate(tree.parents):
        assert parent < node
        assert node == 0 or tree.depths[node] == tree.depths[parent] + 1


def test_only_searches_without_draws_are_beams() -> None:
    options = GrowthOptions(depth=3, top_k=2)
    assert make_growth("beam", 1, 9, options).beam is not None
    assert make_growth("chain", 1, 9, options).beam is not None
    assert make_growth("optimal", 1, 9, options).beam is None
    assert make_growth("salf", 1, 9, options).beam is None
