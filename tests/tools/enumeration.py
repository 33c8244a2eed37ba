"""Exact distributions of verified output: all random outcomes of drafter and verifier are enumerated.

A case is a tree shape, a kind of children and a pair of distributions p (target) and q (drafter). All outcomes with
their weights give the exact law of the output, which must equal the target's. If there are too many of them, a
chi-square test compares samples with a law.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np
import pytest
import torch

from draftwood.config import SamplingParams
from draftwood.sampling import Randomness, Warper
from draftwood.tree import DraftTree, Proposal, TreeBuilder
from draftwood.verify import AcceptedPath, accept_sampled

R = TypeVar("R")
Shape = tuple["Shape", ...]  # a node is the tuple of its children
Verifier = Callable[[DraftTree, Callable[[int], torch.Tensor], Randomness], AcceptedPath]
Law = dict[tuple[int, ...], float]

KINDS = ("chosen", "drawn", "mixed")
PAIRS = ("independent", "zeros", "equal", "disjoint", "one-hot", "warped")


class Branching:
    """A Randomness that follows a script, then takes the first outcome and notes the others as scripts to run later."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self._script = script
        self._taken: list[int] = []
        self.weight = 1.0
        self.untaken: list[tuple[int, ...]] = []

    def accept(self, probability: float) -> bool:
        assert 0.0 <= probability <= 1.0
        return bool(self._pick([1.0 - probability, probability]))

    def draw(self, probs: torch.Tensor) -> int:
        weights: list[float] = probs.double().tolist()
        total = math.fsum(weights)
        return self._pick([weight / total for weight in weights])

    def _pick(self, weights: list[float]) -> int:
        possible = [value for value, weight in enumerate(weights) if weight > 0.0]
        step = len(self._taken)
        if step < len(self._script):
            value = self._script[step]
        else:
            value = possible[0]
            self.untaken += [(*self._taken, other) for other in possible[1:]]
        self._taken.append(value)
        self.weight *= weights[value]
        return value


def decide_in_engine(chance: Branching, patch: pytest.MonkeyPatch) -> None:
    """All random decisions of the engine are those of ``chance``, node by node; targets draw by random numbers."""
    patch.setattr("draftwood.engine.session.SeededRandomness", lambda *_: chance)
    patch.setattr("draftwood.engine.passes.plan_draw", lambda _: None)


def outcomes(experiment: Callable[[Branching], R]) -> Iterator[tuple[R, float]]:
    """Every result of an experiment, with its probability."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        chance = Branching(scripts.pop())
        yield experiment(chance), chance.weight
        scripts += chance.untaken


class Case:
    """p and q as functions of the context (the tokens after the root), different in every context."""

    def __init__(self, pair: str, vocab: int = 4, seed: int = 0) -> None:
        self.pair, self.vocab, self.seed = pair, vocab, seed
        self.probs = lru_cache(maxsize=None)(self._probs)

    def _probs(self, context: tuple[int, ...]) -> tuple[torch.Tensor, np.ndarray, list[int]]:
        """p [V] of the target, q [V], and the tokens in the order of preference of a choosing drafter."""
        rng = np.random.default_rng([self.seed, PAIRS.index(self.pair), len(context), *context])
        p, q = rng.dirichlet(np.ones(self.vocab), 2)
        order = rng.permutation(self.vocab).tolist()
        if self.pair == "zeros":
            p[rng.integers(self.vocab)] = q[rng.integers(self.vocab)] = 0.0
        elif self.pair == "equal":
            q = p
        elif self.pair == "disjoint":
            p[order[2:]] = q[order[:2]] = 0.0
        elif self.pair == "one-hot":
            p = np.eye(self.vocab)[order[1]]
        elif self.pair == "warped":
            warper = Warper(SamplingParams(temperature=0.7, top_k=3, repetition_penalty=1.3), [0])
            return warper.probs(torch.from_numpy(rng.normal(size=self.vocab)).float(), context), q / q.sum(), order
        return torch.from_numpy(p / p.sum()), q / q.sum(), order

    def draft(self, shape: Shape, kind: str, chance: Randomness, forget: bool = False) -> DraftTree:
        """Grow a tree of the shape. ``forget``: a faulty drafter that drops an unlikely last draw."""
        builder = TreeBuilder(0)
        proposals: dict[int, Proposal] = {}
        num_chosen: dict[int, int] = {}

        def grow(node: int, context: tuple[int, ...], shape: Shape) -> None:
            _, q, order = self.probs(context)
            count = {"chosen": len(shape), "drawn": 0, "mixed": (len(shape) + 1) // 2}[kind]
            tokens = order[:count]
            q = q.copy()
            q[tokens] = 0.0
            if count < len(shape) and q.any():
                support = np.flatnonzero(q)
                proposals[node], num_chosen[node] = Proposal(support, q[support] / q.sum()), count
                for _ in range(min(len(shape) - count, len(support))):
                    token = chance.draw(torch.from_numpy(q))
                    if not (forget and q[token] < q.max()):
                        tokens = [*tokens, token]
                    q[token] = 0.0
            children = [builder.add(node, token, "test") for token in tokens]
            for child, token, below in zip(children, tokens, shape, strict=False):
                grow(child, (*context, token), below)

        grow(0, (), shape)
        return builder.build(proposals, num_chosen)

    def extend(self, law: Law, length: int) -> Law:
        """Continue every output with the target to the same length."""
        whole: Law = defaultdict(float)
        for output, weight in law.items():
            if len(output) == length:
                whole[output] += weight
                continue
            p = self.probs(output)[0].double()
            longer = {(*output, token): weight * float(p[token] / p.sum()) for token in range(self.vocab)}
            for sequence, share in self.extend(longer, length).items():
                whole[sequence] += share
        return whole


def shapes(nodes: int, depth: int) -> Iterator[Shape]:
    """All ordered trees with that many nodes below the root, at most ``depth`` levels."""
    if nodes == 0:
        yield ()
    elif depth > 0:
        for inside in range(nodes):  # in the first child's subtree
            for first in shapes(inside, depth - 1):
                for others in shapes(nodes - 1 - inside, depth):
                    yield (first, *others)


def depth_of(shape: Shape) -> int:
    return 1 + max(map(depth_of, shape)) if shape else 0


def joint_law(case: Case, shape: Shape, kind: str, verify: Verifier, forget: bool = False) -> Law:
    """The law of (tokens on the path, bonus, nodes accepted)."""
    law: Law = defaultdict(float)
    trees: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[DraftTree, float]] = {}
    for tree, weight in outcomes(lambda chance: case.draft(shape, kind, chance, forget)):
        same = (tree.tokens, tree.parents)
        trees[same] = (tree, weight + trees.get(same, (tree, 0.0))[1])
    for tree, weight in trees.values():
        for accepted, share in outcomes(partial(verify, tree, _probs_of(case, tree))):
            key = (*accepted.token_ids(tree), len(accepted.path))
            law[key] += weight * share
    return law


def _probs_of(case: Case, tree: DraftTree) -> Callable[[int], torch.Tensor]:
    return lambda node: case.probs(tuple(tree.path_tokens(node)))[0]


def output_error(case: Case, shape: Shape, kind: str, verify: Verifier = accept_sampled, forget: bool = False) -> float:
    """The largest difference between the law of the output and that of the target."""
    return law_error(case, shape, joint_law(case, shape, kind, verify, forget))


def law_error(case: Case, shape: Shape, joint: Law) -> float:
    law: Law = defaultdict(float)
    for key, weight in joint.items():
        law[key[:-1]] += weight
    length = depth_of(shape) + 1
    return difference(case.extend(law, length), case.extend({(): 1.0}, length))


def difference(one: Law, other: Law) -> float:
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


def assert_fits(seen: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> None:
    """Chi-square with Wilson-Hilferty: the cube root is nearly normal. Seeds are fixed; p > 1e-4 is z < 3.72."""
    runs = seen.total()
    assert set(seen) <= set(law)
    cells = [(seen[key], weight * runs) for key, weight in law.items() if weight * runs >= 5]
    rest = (runs - sum(n for n, _ in cells), runs - sum(e for _, e in cells))
    statistic = sum((n - e) ** 2 / e for n, e in [*cells, rest] if e > 1)
    freedom = len(cells) - (rest[1] <= 1)
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert z < 3.72
