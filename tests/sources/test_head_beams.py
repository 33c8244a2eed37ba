"""Beams of EAGLE heads in one launch against the same growth pass by pass: on a GPU if there is one, and in Triton's
interpreter everywhere."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from draftwood.growth.neural import GrowthOptions, make_growth
from draftwood.sources.neural.base import DraftSegment
from draftwood.sources.neural.head_graphs import GraphedEagleModel
from draftwood.targets.base import Segment, chain_parents
from draftwood.targets.beams import BeamPlan
from draftwood.tree import DraftTree
from tests.sources.test_head_graphs import MODEL, new_model, small_shapes
from tests.tools.triton import DEVICE, INTERPRETED, run_interpreted, runs_kernels

pytest.importorskip("triton")

__all__ = ["small_shapes"]  # a fixture
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
PLANS = [("beam", 3, 3), ("beam", 2, 1), ("chain", 1, 4)] if INTERPRETED else [("beam", 10, 7), ("chain", 1, 7)]


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


class Trees:
    """Texts of several sequences that go on from cycle to cycle; their trees grow below them."""

    def __init__(self, model: GraphedEagleModel, sequences: int, seed: int) -> None:
        self._model = model
        self._rng, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self._sequences = [model.open(100) for _ in range(sequences)]

    def texts(self) -> list[DraftSegment]:
        width = self._model._head.config.num_taps * MODEL.hidden_size
        segments = []
        for sequence in self._sequences:
            size = self._rng.randint(1, 3)
            tokens = self._rng.choices(range(MODEL.vocab_size), k=size)
            taps = torch.randn(size, width, generator=self._generator).to(DEVICE, self._model._hidden.dtype)
            segments.append(DraftSegment(Segment(sequence, tokens, chain_parents(size), 1), taps))
        return segments

    def in_one_launch(self, growths: list, segments: list[DraftSegment]) -> list[DraftTree]:
        beams = [growth.beam for growth in growths]
        plan = BeamPlan(beams[0].width, beams[0].top_k, max(beam.depth for beam in beams) - 1)
        found = self._model.grow(segments, plan)
        assert found is not None
        self._keep(segments)
        return [beam.tree(*rows) for beam, rows in zip(beams, found, strict=True)]

    def pass_by_pass(self, growths: list, segments: list[DraftSegment]) -> list[DraftTree]:
        run = [0] * len(growths)
        k = max(growth.width for growth in growths)
        top = self._model.forward(segments, k)
        self._keep(segments)
        for number, growth in enumerate(growths):
            rows = top.at(slice(number, number + 1)).first(growth.width)
            growth.grow(rows.ids, rows.probs())
            while (frontier := growth.frontier()) is not None:
                above = [parent - 1 for parent in frontier.parents]
                sequence = segments[number].segment.sequence
                segment = Segment(sequence, frontier.tokens, above, len(above), run[number])
                rows = self._model.forward([DraftSegment(segment)], growth.width)
                run[number] += len(above)
                growth.grow(rows.ids, rows.probs())
            self._model.keep(segments[number].segment.sequence, [])
        return [growth.tree() for growth in growths]

    def _keep(self, segments: list[DraftSegment]) -> None:
        for segment, _ in segments:
            self._model.keep(segment.sequence, range(len(segment.token_ids)))


@runs_kernels
@pytest.mark.parametrize(("growth", "width", "depth"), PLANS)
@pytest.mark.parametrize("sequences", [1, 3])
def test_the_same_trees_as_pass_by_pass(growth: str, width: int, depth: int, sequences: int) -> None:
    options = GrowthOptions(depth=depth, top_k=width)
    rng = random.Random(3)
    budgets = [[rng.randint(3, 20) for _ in range(sequences)] for _ in range(2 if INTERPRETED else 8)]
    found = []
    for way in ("in_one_launch", "pass_by_pass"):
        model = new_model(GraphedEagleModel, "eagle3", DTYPE)
        trees = Trees(model, sequences, seed=7)
        for own in budgets:
            segments = trees.texts()
            roots = [segment.segment.token_ids[-1] for segment in segments]
            growths = [make_growth(growth, root, size, options) for root, size in zip(roots, own, strict=True)]
            found.append(getattr(trees, way)(growths, segments))
    half = len(budgets)
    for beams, grown in zip(found[:half], found[half:], strict=True):
        for one, other in zip(beams, grown, strict=True):
            if torch.float32 == DTYPE:
                assert (one.tokens, one.parents, one.depths) == (other.tokens, other.parents, other.depths)
                np.testing.assert_allclose(one.probs, other.probs, rtol=1e-4)
            else:  # rounding may change the order of two candidates, and what follows them
                shared = {*zip(one.tokens, one.depths, strict=True)} & {*zip(other.tokens, other.depths, strict=True)}
                assert len(shared) >= 0.7 * len(set(zip(other.tokens, other.depths, strict=True)))


@runs_kernels
def test_what_does_not_fit_is_left_to_single_passes() -> None:
    model = new_model(GraphedEagleModel, "eagle3", DTYPE)
    trees = Trees(model, 1, seed=1)
    for plan in (BeamPlan(33, 3, 2), BeamPlan(32, 3, 6), BeamPlan(3, 1000, 2)):
        assert model.grow(trees.texts(), plan) is None
