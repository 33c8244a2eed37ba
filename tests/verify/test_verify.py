"""Verification is exact: see tests/tools/enumeration.py for how every random outcome is counted."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.config import SamplingParams
from draftwood.errors import ModelError
from draftwood.sampling import Randomness, SeededRandomness, Warper
from draftwood.sampling.randomness import draw_tokens
from draftwood.tree import DraftTree, Proposal, TreeBuilder
from draftwood.verify import AcceptedPath, accept_greedy, accept_predrawn, accept_sampled, upcoming_numbers
from tests.tools.enumeration import (
    KINDS,
    PAIRS,
    Case,
    Law,
    Shape,
    Verifier,
    difference,
    joint_law,
    law_error,
    outcomes,
    output_error,
    shapes,
)

EXACT = 1e-12


# ---- the literal rules, and faulty variants ----


def literal(fault: str = "") -> Verifier:
    """A literal implementation of the rules on dense normalised arrays; optionally with one plausible mistake."""

    def verify(tree: DraftTree, probs_of: Callable[[int], torch.Tensor], chance: Randomness) -> AcceptedPath:
        path = [0]
        while True:
            p = probs_of(path[-1]).double().numpy().copy()
            p /= p.sum()
            child = _literal_child(tree, path[-1], p, chance, fault)
            if child is None:
                return AcceptedPath(tuple(path), chance.draw(torch.from_numpy(p)))
            path.append(child)

    return verify


def _literal_child(tree: DraftTree, node: int, p: np.ndarray, chance: Randomness, fault: str) -> int | None:
    """The accepted child; otherwise p becomes the distribution of the bonus token."""
    children = tree.children()[node]
    proposal = tree.proposals.get(node)
    count = len(children) if proposal is None else tree.num_chosen.get(node, 0)
    for child in children[:count]:
        x = tree.tokens[child]
        if chance.accept(min(1.0, p[x])):
            return child
        if fault != "chosen stay in p":
            p[x] = 0.0
            p /= p.sum()
    if proposal is None:
        return None
    q = np.zeros_like(p)
    q[proposal.token_ids] = proposal.probs
    drawn = children[count:]
    if fault == "likeliest first":
        drawn = sorted(drawn, key=lambda child: -q[tree.tokens[child]])
    for child in drawn:
        x = tree.tokens[child]
        if chance.accept(min(1.0, p[x] / q[x])):
            return child
        if fault == "one-hot residual":
            p[x] = 0.0
        else:
            residual = np.maximum(p - q, 0.0)
            p[:] = residual if residual.any() else p  # p and q can be equal up to rounding
        p /= p.sum()
        q[x] = 0.0
        if fault != "q not renormalised" and q.any():
            q /= q.sum()
    return None


FAULTS = {
    "chosen stay in p": "mixed",
    "likeliest first": "drawn",
    "one-hot residual": "drawn",
    "q not renormalised": "drawn",
}

SMALL = [shape for nodes in range(4) for shape in shapes(nodes, 3)]
LARGE: list[Shape] = [((), (), ()), ((), (), (), ()), (((),), ((),)), (((), ()), ()), ((((), ()),),)]


# ---- sampled ----


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("kind", KINDS)
def test_output_and_acceptance_match_literal_rules(pair: str, kind: str) -> None:
    """A verifier that ignores the tree also has the right output, so the accepted nodes are compared as well."""
    case = Case(pair)
    for shape in [*SMALL, *LARGE]:
        law = joint_law(case, shape, kind, accept_sampled)
        assert law_error(case, shape, law) < EXACT, shape
        assert difference(law, joint_law(case, shape, kind, literal())) < EXACT, shape


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SMALL), st.sampled_from(KINDS), st.sampled_from(PAIRS), st.integers(2, 999), st.integers(4, 6))
def test_exactness_over_random_distributions(shape: Shape, kind: str, pair: str, seed: int, vocab: int) -> None:
    assert output_error(Case(pair, vocab, seed), shape, kind) < EXACT


@pytest.mark.parametrize("fault", FAULTS)
def test_enumeration_detects_wrong_rules(fault: str) -> None:
    case, shape = Case("independent"), ((), (), ())
    assert output_error(case, shape, FAULTS[fault], literal()) < EXACT
    assert output_error(case, shape, FAULTS[fault], literal(fault)) > 1e-3


def test_enumeration_detects_drafter_that_drops_draws() -> None:
    assert output_error(Case("independent"), ((),), "drawn", forget=True) > 1e-3


def test_everything_is_accepted_if_q_equals_p() -> None:
    law = joint_law(Case("equal"), ((((),),),), "drawn", accept_sampled)
    assert math.fsum(weight for key, weight in law.items() if key[-1] == 4) == pytest.approx(1.0, abs=EXACT)


def test_nothing_drawn_is_accepted_when_the_supports_are_disjoint() -> None:
    law = joint_law(Case("disjoint"), ((), ()), "drawn", accept_sampled)
    assert {key[-1] for key in law} == {1}


def test_only_visited_nodes_are_evaluated() -> None:
    tree = DraftTree((0, 1, 2, 3), (-1, 0, 0, 2), (0, 1, 1, 2), ("t",) * 4, (1.0,) * 4)
    asked: list[int] = []

    def probs_of(node: int) -> torch.Tensor:
        asked.append(node)
        return torch.eye(4)[{0: 2, 2: 0}[node]]

    assert accept_sampled(tree, probs_of, SeededRandomness(0)) == AcceptedPath((0, 2), 0)
    assert asked == [0, 2]


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_gives_the_same_output_with_any_chosen_tree(seed: int) -> None:
    case, length = Case("independent", vocab=6), 12

    def decode(shape: Shape) -> list[int]:
        randomness = SeededRandomness(seed)
        output: list[int] = []
        while len(output) < length:
            tree = case.draft(shape, "chosen", randomness)
            start = tuple(output)

            def probs_of(node: int, tree: DraftTree = tree, start: tuple[int, ...] = start) -> torch.Tensor:
                return case.probs((*start, *tree.path_tokens(node)))[0]

            output += accept_sampled(tree, probs_of, randomness).token_ids(tree)
        return output[:length]

    assert decode(()) == decode((((), ()), ((),), ())) == decode(((((),),),))


# ---- all nodes at once ----


@st.composite
def sampled_trees(draw: st.DrawFn) -> tuple[DraftTree, torch.Tensor, SamplingParams]:
    """A tree of chosen children over a few tokens, logits [N, V] for its nodes, and sampling parameters."""
    vocab = draw(st.sampled_from([4, 9, 1200]))
    builder = TreeBuilder(0)
    for _ in range(draw(st.integers(0, 25))):
        parent, token = draw(st.integers(0, len(builder) - 1)), draw(st.integers(0, 3))
        if builder.find(parent, token) is None:
            builder.add(parent, token, "test")
    tree = builder.build()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = 3.0 * torch.randn(len(tree), vocab, generator=generator)
    logits[:, :4] += 6.0  # so that paths are long
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.3, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 3, 40])),
        top_p=draw(st.sampled_from([1.0, 0.9, 0.5])),
        min_p=draw(st.sampled_from([0.0, 0.1])),
    )
    return tree, logits, params


def accept_at_once(tree: DraftTree, probs: torch.Tensor, randomness: SeededRandomness) -> AcceptedPath:
    return accept_predrawn(tree, draw_tokens(probs, upcoming_numbers(tree, randomness)), randomness)


@given(sampled=sampled_trees(), seed=st.integers(0, 2**32))
def test_batched_acceptance_equals_node_by_node(
    sampled: tuple[DraftTree, torch.Tensor, SamplingParams], seed: int
) -> None:
    """The same path, and the same random numbers remain for later draws."""
    tree, logits, params = sampled
    warper = Warper(params, [])
    one_by_one, together = SeededRandomness(seed), SeededRandomness(seed)
    for _ in range(3):
        expected = accept_sampled(tree, lambda node: warper.probs(logits[node]), one_by_one)
        assert accept_at_once(tree, warper.probs(logits), together) == expected
    assert together.upcoming(3) == one_by_one.upcoming(3)


def test_only_nodes_of_the_path_can_fail() -> None:
    tree = DraftTree((0, 1, 2), (-1, 0, 0), (0, 1, 1), ("t",) * 3, (1.0,) * 3)
    probs = torch.eye(4)[[2, 0, 3]]
    probs[1] = float("nan")
    assert accept_at_once(tree, probs, SeededRandomness(0)) == AcceptedPath((0, 2), 3)
    probs[2] = float("nan")
    with pytest.raises(ModelError, match="invalid probabilities"):
        accept_at_once(tree, probs, SeededRandomness(0))


# ---- rounding ----


def one_level(drawn: Sequence[int], ids: Sequence[int], probs: Sequence[float]) -> DraftTree:
    builder = TreeBuilder(0)
    for token in drawn:
        builder.add(0, token, "test")
    return builder.build({0: Proposal(np.array(ids), np.array(probs))})


class Refusing:
    """Rejects whenever possible: only a probability of exactly 1 is accepted."""

    def __init__(self) -> None:
        self._seeded = SeededRandomness(0)

    def accept(self, probability: float) -> bool:
        return probability >= 1.0

    def draw(self, probs: torch.Tensor) -> int:
        return self._seeded.draw(probs)


@pytest.mark.parametrize("ids", [[0, 1, 2], [2, 1, 0]])
def test_rejection_by_rounding_leaves_valid_residual(ids: list[int]) -> None:
    """q equals p up to the last bit: the residual is zero or noise, and still no impossible token is emitted."""
    p = torch.tensor([0.1, 0.2, 0.7, 0.0], dtype=torch.float64)
    for wobble in (1.0, 1.0 + 1e-16, 1.0 - 2e-16, 1.0 + 3e-16):
        q = p[ids].numpy() * np.array([wobble, 1.0, 1.0])
        tree = one_level(ids, ids, q.tolist())
        accepted = accept_sampled(tree, lambda _: p, Refusing())
        assert accepted.token_ids(tree)[0] in (0, 1, 2)


def test_child_with_zero_q_is_ignored() -> None:
    p = torch.tensor([0.5, 0.5, 0.0])
    for token in (0, 2):
        tree = one_level([1, token], [1, token], [1.0, 0.0])
        law: Law = defaultdict(float)
        for accepted, weight in outcomes(partial(accept_sampled, tree, lambda _: p)):
            law[(accepted.token_ids(tree)[0],)] += weight
        assert difference(law, {(0,): 0.5, (1,): 0.5}) < EXACT


def test_an_impossible_child_is_never_accepted() -> None:
    p = torch.tensor([1.0, 0.0, 0.0])
    for tiny in (1.0, 1e-200, 5e-324, 0.0):
        tree = one_level([1, 2], [1, 2], [tiny, tiny])
        assert accept_sampled(tree, lambda _: p, SeededRandomness(0)) == AcceptedPath((0,), 0)


@pytest.mark.parametrize("bad", [float("nan"), 0.0])
def test_invalid_probabilities_are_reported(bad: float) -> None:
    p = torch.full((3,), bad)
    for tree in (DraftTree.chain([0, 1]), one_level([1, 2], [1, 2], [0.5, 0.5])):
        with pytest.raises(ModelError, match="invalid probabilities"):
            accept_sampled(tree, lambda _: p, SeededRandomness(0))


def test_target_probabilities_are_not_modified() -> None:
    p = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    accept_sampled(one_level([2, 1], [2, 1], [0.9, 0.1]), lambda _: p, SeededRandomness(0))
    assert p.tolist() == [0.5, 0.5, 0.0]


# ---- greedy ----


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    builder = TreeBuilder(draw(st.integers(0, 3)))
    for _ in range(draw(st.integers(0, 20))):
        builder.add(draw(st.integers(0, len(builder) - 1)), draw(st.integers(0, 3)), "test")
    return builder.build()


@given(trees(), st.lists(st.integers(0, 3), min_size=21, max_size=21))
def test_greedy_takes_longest_path_of_target_choices(tree: DraftTree, choices: list[int]) -> None:
    accepted = accept_greedy(tree, choices)
    path = list(accepted.path)
    assert path == tree.path(path[-1])
    assert accepted.token_ids(tree) == [choices[node] for node in path]
    agreeing = [  # every node whose whole path the target would have chosen
        node
        for node in range(len(tree))
        if tree.path_tokens(node) == [choices[above] for above in tree.path(node)[:-1]]
    ]
    assert sorted(path) == agreeing


@given(trees(), st.lists(st.integers(0, 3), min_size=21, max_size=21))
def test_greedy_evaluates_only_the_path(tree: DraftTree, choices: list[int]) -> None:
    asked: list[int] = []

    def choice(node: int) -> int:
        asked.append(node)
        return choices[node]

    accepted = accept_greedy(tree, choice)
    assert accepted == accept_greedy(tree, choices)
    assert asked == list(accepted.path)


@given(trees(), st.lists(st.integers(0, 3), min_size=21, max_size=21), st.integers(0, 5))
def test_greedy_is_sampling_from_one_hot_distributions(tree: DraftTree, choices: list[int], seed: int) -> None:
    eye = torch.eye(4)
    sampled = accept_sampled(tree, lambda node: eye[choices[node]], SeededRandomness(seed))
    assert sampled == accept_greedy(tree, choices)
