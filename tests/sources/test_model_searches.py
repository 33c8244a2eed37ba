"""Small models that grow whole trees by themselves against the same drafter pass by pass: on a GPU if there is one, and
in Triton's interpreter everywhere."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftwood.config import SamplingParams
from draftwood.drafters.base import DraftRequest, VerifiedTree
from draftwood.drafters.neural import SharedDraftModel
from draftwood.drafters.sps import SmallModelDrafter, SmallModelOptions
from draftwood.sources.neural import SmallModel
from draftwood.targets.base import Segment, chain_parents
from draftwood.tree import DraftTree
from tests.tools.cuda import BASE, new_target
from tests.tools.triton import INTERPRETED, run_interpreted, runs_kernels

pytest.importorskip("triton")

CYCLES = 3 if INTERPRETED else 10
GROWTHS = [("chain", 4), ("beam", 3)] if INTERPRETED else [("chain", 4), ("beam", 6), ("optimal", 12), ("salf", 12)]
PROMPTS = [[5, 9, 17, 3], [40, 2]]


@pytest.mark.skipif(INTERPRETED, reason="is the interpreter")
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


class OnePassAtATime(SmallModel):
    def grow(self, *_: object) -> None:
        return None


def new_drafters(model: SmallModel, options: SmallModelOptions) -> list[SmallModelDrafter]:
    drafters = []
    for prompt in PROMPTS:
        drafter = SmallModelDrafter(options, SharedDraftModel(model, options.growth_options(), "sps", 90))
        drafter.begin(DraftRequest(prompt, SamplingParams(max_tokens=40), np.random.default_rng(0)))
        drafters.append(drafter)
    return drafters


def accept(tree: DraftTree, rng: random.Random) -> VerifiedTree:
    """A random path from the root, and a bonus token."""
    path = [0]
    while (children := tree.children_of(path[-1])) and rng.random() < 0.8:
        path.append(rng.choice(children))
    emitted = [*(tree.tokens[node] for node in path[1:]), rng.randrange(BASE.vocab_size)]
    return VerifiedTree(tree, torch.zeros(0, BASE.vocab_size), [], path, emitted, None)


@runs_kernels
@pytest.mark.parametrize(("growth", "depth"), GROWTHS)
def test_the_same_trees_as_pass_by_pass(growth: str, depth: int) -> None:
    options = replace(SmallModelOptions(model="small"), growth=growth, depth=depth, top_k=3, batch=3, threshold=0.05)
    models = [kind(new_target(), BASE.vocab_size) for kind in (SmallModel, OnePassAtATime)]
    drafters, other = (new_drafters(model, options) for model in models)
    rng = random.Random(4)
    for _ in range(CYCLES):
        budgets = [rng.randint(4, 12) for _ in PROMPTS]
        trees = SmallModelDrafter.propose_batch(drafters, budgets)
        grown = SmallModelDrafter.propose_batch(other, budgets)
        for tree, same, drafter, twin in zip(trees, grown, drafters, other, strict=True):
            if INTERPRETED or growth == "chain":
                assert (tree.tokens, tree.parents, tree.depths) == (same.tokens, same.parents, same.depths)
                assert tree.probs == pytest.approx(same.probs, rel=1e-2)
            verified = accept(tree, rng)
            for each in (drafter, twin):
                each._tree = tree  # rounding may swap two candidates on a GPU; both go on with the same text
                each.observe(verified)
        if not INTERPRETED and growth != "chain":
            continue
        # What both caches hold predicts the same.
        rows = []
        for model, own in zip(models, (drafters, other), strict=True):
            lengths = [drafter._length for drafter in own]
            segments = [Segment(drafter._sequence, [7], chain_parents(1), 1) for drafter in own]
            logits = model.target.forward(segments).logits.float()
            for drafter, length in zip(own, lengths, strict=True):
                model.target.truncate(drafter._sequence, length)
            rows.append((lengths, logits))
        assert rows[0][0] == rows[1][0]
        torch.testing.assert_close(
            rows[0][1], rows[1][1], rtol=0.0, atol=0.2
        )  # a wrong cache row changes logits by 1 and more


@runs_kernels
def test_drafts_that_the_target_does_not_have_are_left_to_single_passes() -> None:
    model = SmallModel(new_target(), BASE.vocab_size - 5)
    (first, _) = new_drafters(model, replace(SmallModelOptions(model="small"), growth="chain", depth=3))
    tree = first.propose(4)
    assert first._growth._found is None
    assert 1 <= len(tree) <= 4
