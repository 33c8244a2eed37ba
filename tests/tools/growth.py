"""Shared by tests of growth and shapes: random tables of successors, random shapes, and neural sources
without a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from draftwood.growth.best_first import Lookup, Successors
from draftwood.growth.drawn import Draw, choose_best
from draftwood.growth.neural.policies import Growth, GrowthOptions, make_growth
from draftwood.sampling import Randomness
from draftwood.tree import DraftTree
from draftwood.tree.shapes import TreeShape, recycling_tree

NUM_TOKENS = 5

# By the token before and the token itself; rows of tokens and scores, best first.
Table = Mapping[tuple[int, int], Successors]


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Rows of up to three successors, none for some contexts, some scores too small to be used."""
    table = {}
    for previous in range(NUM_TOKENS):
        for token in range(NUM_TOKENS):
            tokens = draw(st.lists(st.integers(0, NUM_TOKENS - 1), max_size=3, unique=True))
            scores = draw(st.lists(st.floats(0.0, 0.6), min_size=len(tokens), max_size=len(tokens)))
            table[previous, token] = tokens, sorted(scores, reverse=True)
    return table


def make_lookup(table: Table) -> Lookup:
    return lambda previous, token: table.get((previous, token), ([], []))


@st.composite
def shapes(draw: st.DrawFn, max_size: int = 25) -> TreeShape:
    parents, ranks, counts = [-1], [0], [0]
    for node in range(1, draw(st.integers(1, max_size))):
        parent = draw(st.integers(0, node - 1))
        parents.append(parent)
        ranks.append(counts[parent])
        counts[parent] += 1
        counts.append(0)
    return TreeShape(tuple(parents), tuple(ranks))


# -- neural sources --------------------------------------------------------------------------------------------------

ROOT = 77
Path = tuple[int, ...]  # the tokens below the root
Distribution = Callable[[Path], np.ndarray]  # [V], what follows a path


def growth_of(name: str, budget: int, draw: Draw = choose_best, **options: Any) -> Growth:
    if name == "static":
        options = {"shape": recycling_tree(), **options}
    return make_growth(name, ROOT, budget, GrowthOptions(**options), draw)


class Drafted(NamedTuple):
    """The result of a growth."""

    tree: DraftTree
    expanded: list[Path]  # the expanded nodes, in order
    passes: list[int]  # number of expanded nodes per draft pass


@st.composite
def distributions(draw: st.DrawFn, ties: bool = True, max_vocab: int = 4) -> tuple[int, Distribution]:
    """A vocabulary and a distribution per path. With ties, many paths have exactly the same probability, some have zero
    probability, and some have no continuation."""
    vocab = draw(st.integers(1 if ties else 2, max_vocab))
    seed, kind = draw(st.integers(0, 1 << 30)), draw(st.sampled_from(["flat", "peaked", "ties"] if ties else ["flat"]))

    @cache
    def after(path: Path) -> np.ndarray:
        rng = np.random.default_rng([seed, len(path), *path])
        if kind == "ties":
            probs = rng.choice([0.5, 0.25, 0.125], vocab) / vocab
        else:
            probs = rng.dirichlet(np.full(vocab, 1.0 if kind == "flat" else 0.2))
        if ties:
            probs = probs * (rng.random(vocab) < 0.8)
        return probs.astype(np.float32)

    return vocab, after


def neural_rows(after: Distribution, paths: Sequence[Path], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of a neural source: [F, k] each, best first, with ties to the lower token."""
    probs = np.array([after(path) for path in paths], dtype=np.float32)
    order = np.argsort(-probs, axis=1, kind="stable")[:, :width]
    probs = np.take_along_axis(probs, order, axis=1)
    return np.where(probs > 0.0, order, -1).astype(np.int32), probs


def drafted(growth: Growth, after: Distribution, max_passes: int = 1000, unasked: int = 0) -> Drafted:
    """Run a growth with that source, which knows only the frontiers and may return extra entries."""
    expanded: list[Path] = []
    passes: list[int] = []
    while len(passes) < max_passes and (frontier := growth.frontier()) is not None:
        assert growth.frontier() == frontier
        if not expanded:
            assert list(frontier.parents) == [-1]
        paths = [
            (*expanded[parent], token) if expanded else ()
            for token, parent in zip(frontier.tokens, frontier.parents, strict=True)
        ]
        growth.grow(*neural_rows(after, paths, growth.width + unasked))
        expanded += paths
        passes.append(len(paths))
    return Drafted(growth.tree(), expanded, passes)


class ScriptedGenerator:
    """Replaces numpy's generator to enumerate every outcome of drawing."""

    def __init__(self, chance: Randomness) -> None:
        self._chance = chance

    def choice(self, size: int, p: np.ndarray) -> int:
        assert len(p) == size
        return self._chance.draw(torch.from_numpy(p))
