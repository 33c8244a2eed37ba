"""Searches that EAGLE heads run by themselves against the same growth pass by pass: on a GPU if there is one, and in
Triton's interpreter everywhere."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from draftwood.growth.neural import GrowthOptions, make_growth
from draftwood.growth.neural.search import Search
from draftwood.sources.neural.base import DraftSegment
from draftwood.sources.neural.head_graphs import GraphedEagleModel
from draftwood.targets.base import DeviceAnswer, Segment, chain_parents
from draftwood.targets.cache import KVCache
from draftwood.targets.native.cuda.inputs import Inputs, new_moves
from draftwood.targets.native.cuda.searches import MAX_RUN
from draftwood.targets.native.decoder import pack
from draftwood.targets.searches import SearchLimits, SearchPlan
from draftwood.tree import DraftTree, TreeShape
from tests.sources.test_head_graphs import MODEL, new_model, small_shapes
from tests.tools.triton import DEVICE, INTERPRETED, run_interpreted, runs_kernels

pytest.importorskip("triton")

__all__ = ["small_shapes"]  # a fixture
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
SHAPE = TreeShape((-1, 0, 0, 0, 1, 1, 2, 4, 4, 7), (0, 0, 1, 2, 0, 1, 0, 0, 1, 0))
PLANS = [("beam", 3, 3, 3), ("beam", 2, 1, 1), ("optimal", 3, 5, 2), ("salf", 2, 4, 1), ("static", 1, 9, 2)]
if not INTERPRETED:
    GPU_PLANS = [("beam", 10, 7), ("optimal", 10, 20), ("salf", 10, 20), ("chain", 1, 7), ("static", 1, 9)]
    PLANS = [(*plan, sequences) for plan in GPU_PLANS for sequences in (1, 3)]


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

    def by_itself(self, growths: list, segments: list[DraftSegment]) -> list[DraftTree]:
        searches = [growth.search for growth in growths]
        found = self._model.grow(segments, plan_for(searches))
        assert found is not None
        return [search.build(each).tree for search, each in zip(searches, found, strict=True)]

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
        for segment, *_ in segments:
            self._model.keep(segment.sequence, range(len(segment.token_ids)))


def plan_for(searches: list[Search]) -> SearchPlan:
    kind = searches[0].kind
    limits = [
        SearchLimits(search.spec.budget - 1, search.depth, () if search.shape is None else search.shape.picks)
        for search in searches
    ]
    passes = min(max(search.passes for search in searches), MAX_RUN // kind.width)
    return SearchPlan(kind.width, kind.top_k, passes, limits, kind.anywhere, kind.threshold, kind.is_fixed)


@runs_kernels
@pytest.mark.parametrize(("growth", "width", "depth", "sequences"), PLANS)
def test_the_same_trees_as_pass_by_pass(growth: str, width: int, depth: int, sequences: int) -> None:
    # Trees that stop early would run on for others in one launch, so all trees of SALF stop at the same time.
    options = GrowthOptions(depth=depth, top_k=width, batch=width, threshold=0.01, shape=SHAPE)
    rng = random.Random(3)
    budgets = [[rng.randint(3, 20) for _ in range(sequences)] for _ in range(2 if INTERPRETED else 8)]
    found = []
    for way in ("by_itself", "pass_by_pass"):
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
def test_a_search_stops_where_the_growth_would() -> None:
    """The first search waits for every pass. The next ones run ahead by as many passes as the last one needed; other
    thresholds do not change that."""
    model = new_model(GraphedEagleModel, "eagle3", DTYPE)
    trees = Trees(model, 1, seed=5)

    def count_passes(name: str, threshold: float) -> tuple[int, int]:
        """Passes below the root that were run, and that the growth would have run."""
        options = GrowthOptions(depth=20, top_k=2, batch=2, threshold=threshold)
        segments = trees.texts()
        growth = make_growth(name, segments[0].segment.token_ids[-1], 20, options)
        assert growth.search is not None
        (found,) = model.grow(segments, plan_for([growth.search])) or ()
        run = np.where(found.picks >= 0, found.values[found.picks], 0.0).reshape(-1, 2).sum(axis=1)[1:]
        (launch,) = model._decoder._searches.launches.values()
        needed = launch._needed[growth.search.threshold or 0.0]
        assert all(run[:needed] >= threshold)
        assert needed == len(run) or run[needed] < threshold
        return len(run), needed

    threshold = 0.5 if INTERPRETED else 0.05
    ran, needed = count_passes("salf", threshold)
    assert ran == needed
    assert count_passes("optimal", 0.0)[0] > needed  # runs on until no child has a place in the tree
    ran, _ = count_passes("salf", threshold)
    assert ran >= needed
    assert ran <= max(needed, launch_needed(model, threshold))


def launch_needed(model: GraphedEagleModel, threshold: float) -> int:
    (launch,) = model._decoder._searches.launches.values()
    return launch._needed[threshold]


@runs_kernels
def test_what_does_not_fit_is_left_to_single_passes() -> None:
    model = new_model(GraphedEagleModel, "eagle3", DTYPE)
    trees = Trees(model, 1, seed=1)
    limits = [SearchLimits(20, 5)]
    for plan in (SearchPlan(33, 3, 2, limits), SearchPlan(32, 3, 6, limits), SearchPlan(3, 1000, 2, limits)):
        assert model.grow(trees.texts(), plan) is None


def answer_for(tokens: list[int], taps: torch.Tensor) -> DeviceAnswer:
    """Of a pass that accepts these tokens, the last one as its bonus; every other node is wrong."""
    size = len(tokens)
    cache = KVCache(1, 1, 1, 64, torch.float32, torch.device("cpu"))
    ids, parents = [1, *tokens[:-1], 0, 0], [*range(-1, size - 1), 0, -1 + size]
    inputs = Inputs(16, 16, 16, DEVICE)
    inputs.fill(pack([Segment(cache.open(40), ids, parents, len(ids))], cache), new_moves())
    inputs.send()
    choices = torch.full((16, 3), -1, dtype=torch.int32, device=DEVICE)
    choices[:size, 0] = torch.tensor(tokens, device=DEVICE)
    rows = torch.zeros(16, taps.shape[1], dtype=taps.dtype, device=DEVICE)
    rows[:size] = taps
    return DeviceAnswer(inputs.ids, inputs.positions, inputs.slots, inputs.words, inputs.tiles, choices, rows)


@runs_kernels
@pytest.mark.parametrize("growth", ["beam", "optimal"])
def test_a_search_launched_before_the_host_knows_the_text(growth: str) -> None:
    """It finds what a search of that text finds. If the text has become another one, nothing has happened."""
    options, found = GrowthOptions(depth=3, top_k=2, batch=2), dict[bool, list[DraftTree]]()
    for is_ahead in (False, True):
        model = new_model(GraphedEagleModel, "eagle3", DTYPE)
        trees, found[is_ahead] = Trees(model, 1, seed=3), []
        for cycle in range(4):
            (part,) = segments = trees.texts()
            text, sequence = list(part.segment.token_ids), part.segment.sequence
            built = make_growth(growth, text[-1], 9, options)
            assert built.search is not None
            if not is_ahead:
                found[False] += trees.by_itself([built], segments)
                continue
            assert part.features is not None
            search = model.start_ahead(answer_for(text, part.features), sequence, plan_for([built.search]))
            assert search is not None
            if cycle == 2:
                assert search([*text, 3]) is None
                found[True] += trees.by_itself([built], segments)
                continue
            if cycle == 1:  # nobody asks for this one
                search = model.start_ahead(answer_for(text, part.features), sequence, plan_for([built.search]))
                assert search is not None
            result = search(text)
            assert result is not None
            found[True].append(built.search.build(result).tree)
    for one, other in zip(found[False], found[True], strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.probs, other.probs, rtol=1e-4 if torch.float32 == DTYPE else 0.05)
