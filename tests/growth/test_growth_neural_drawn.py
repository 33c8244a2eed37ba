"""Drawn trees with neural sources: exact by enumeration, with a shape that is fixed before drawing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch

from draftwood.growth.drawn import make_draw, make_multinomial_draw
from draftwood.growth.neural.policies import GROWTHS, GrowthOptions, drawn_shape
from draftwood.growth.neural.ranked import SearchGrowth
from draftwood.growth.neural.spec import GrowthSpec
from draftwood.sampling import Randomness, SeededRandomness
from draftwood.tree import DraftTree
from draftwood.verify import accept_sampled
from tests.tools.enumeration import PAIRS, Case, Shape, assert_fits, joint_law, law_error
from tests.tools.growth import ROOT, Distribution, Path, ScriptedGenerator, drafted, growth_of
from tests.tools.shapes import uniform_tree


def q_of(case: Case) -> Distribution:
    return lambda path: case.probs(path)[1].astype(np.float32)


def nested(depth: int) -> Shape:
    return (nested(depth - 1),) if depth else ()


class GrownCase(Case):
    """A case whose trees are grown by a policy, token by token, and cut to their first nodes."""

    def __init__(self, pair: str, name: str, size: int, budget: int = 6) -> None:
        super().__init__(pair, vocab=3)
        self._make = partial(growth_of, name, budget, shape=uniform_tree(2, 6), depth=3, batch=2, top_k=3, hit=0.6)
        self._size = size

    def draft(self, shape: Shape, kind: str, chance: Randomness, forget: bool = False) -> DraftTree:
        draw = make_multinomial_draw(ScriptedGenerator(chance))  # type: ignore[arg-type]
        return drafted(self._make(draw), q_of(self)).tree.first(self._size)


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", GROWTHS)
def test_drawn_trees_are_exact_by_enumeration(name: str, pair: str) -> None:
    """For any number of verified first nodes."""
    for size in (6, 3):
        case = GrownCase(pair, name, size)
        assert law_error(case, nested(3), joint_law(case, nested(3), "drawn", accept_sampled)) < 1e-6


def test_enumeration_detects_children_dropped_by_token() -> None:
    """The control: drawing in a search that keeps the best nodes is not exact."""

    class Tempting(SearchGrowth):
        def _order(self) -> Sequence[int]:
            order = super()._order()
            self._proposals = {node: q for node, q in self._proposals.items() if node in order}
            return order

    class TemptingCase(GrownCase):
        def draft(self, shape: Shape, kind: str, chance: Randomness, forget: bool = False) -> DraftTree:
            draw = make_multinomial_draw(ScriptedGenerator(chance))  # type: ignore[arg-type]
            growth = Tempting(GrowthSpec(ROOT, 4, GrowthOptions(top_k=3, depth=3), draw), threshold=0.0)
            return drafted(growth, q_of(self)).tree

    case = TemptingCase("independent", "optimal", 4)
    assert law_error(case, nested(3), joint_law(case, nested(3), "drawn", accept_sampled)) > 1e-3


@pytest.mark.parametrize("name", GROWTHS)
def test_drawn_trees_are_exact_statistically(name: str) -> None:
    """With Gumbel noise, over many cycles of one request's noise."""
    case, runs = Case("independent", vocab=4, seed=3), 800
    draw, randomness = make_draw("gumbel", np.random.default_rng(1)), SeededRandomness(2)
    seen: Counter[tuple[int, ...]] = Counter()
    num_accepted = 0
    for _ in range(runs):
        tree = drafted(growth_of(name, 12, draw), q_of(case)).tree
        accepted = accept_sampled(tree, partial(p_after, case, tree), randomness)
        num_accepted += len(accepted.path) - 1
        output = accepted.token_ids(tree)
        while len(output) < 2:
            output.append(randomness.draw(case.probs(tuple(output))[0]))
        seen[tuple(output[:2])] += 1
    assert num_accepted > runs / 4
    assert_fits(seen, case.extend({(): 1.0}, 2))


def p_after(case: Case, tree: DraftTree, node: int) -> torch.Tensor:
    return case.probs(tuple(tree.path_tokens(node)))[0]


@pytest.mark.parametrize("name", ["beam", "optimal", "salf"])
def test_shape_is_fixed_before_drawing(name: str) -> None:
    shape = drawn_shape(name, 30, GrowthOptions())
    assert len(shape) == 30
    for seed in range(5):
        rng = np.random.default_rng(seed)

        def after(path: Path, rng: np.random.Generator = rng) -> np.ndarray:
            return rng.dirichlet(np.full(50, 0.1)).astype(np.float32) + np.float32(1e-6)

        tree = drafted(growth_of(name, 30, make_draw("gumbel", rng)), after).tree
        assert tree.parents == shape.parents
        assert tree.probs[1:] == tuple(1.0 / (1.0 + rank) for rank in shape.ranks[1:])


def test_lower_trust_in_draws_gives_wider_trees() -> None:
    widths = [drawn_shape("optimal", 61, GrowthOptions(hit=hit)).num_children[0] for hit in (0.99, 0.7, 0.3)]
    assert widths == sorted(widths)
    assert widths[0] < widths[2]
    assert drawn_shape("salf", 61, GrowthOptions(hit=1.0, threshold=1.0)).parents == tuple(range(-1, 60))
