"""Neural drafters through the engine: greedy output is plain output for any guesses and any batch."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from draftwood import SamplingParams
from draftwood.drafters.neural_options import NeuralOptions, sharpen_probs
from draftwood.drafters.registry import drafter_class, drafter_names
from draftwood.growth.neural.policies import GROWTHS, make_growth
from draftwood.targets.native.target import NativeTarget
from tests.tools.neural import (
    KINDS,
    NEURAL,
    _one_thread,  # noqa: F401 - fixtures
    every_growth,
    mean_tree,
    neural_llm,
    random_target,
    same_as_plain,
)

PROMPTS = [[7], "hello hello hello", [7, 8]]


@cache
def target_on(backend: str = "auto") -> NativeTarget:
    return random_target(backend=backend)


def test_every_neural_drafter_is_tested() -> None:
    runs_models = [name for name in drafter_names() if drafter_class(name).runs_model]
    assert runs_models == sorted(NEURAL)


@every_growth
@pytest.mark.parametrize(("drafter", "backend"), [*((d, "auto") for d in NEURAL), *((d, "eager") for d in KINDS)])
def test_greedy_output_is_plain_decoding(backend: str, drafter: str, growth: str) -> None:
    """More prompts than the batch size, some with one or two tokens."""
    llm = neural_llm(drafter, target_on(backend), growth=growth, max_batch=2, prefill_chunk=9)
    prompts, max_tokens = (PROMPTS, 6) if backend == "auto" else (PROMPTS[1:3], 4)
    results = same_as_plain(llm, prompts, SamplingParams(max_tokens=max_tokens))
    assert mean_tree(results) > 1


def test_sharpening_changes_trees_of_greedy_requests_only() -> None:
    usual, sharper = (neural_llm("eagle3", target_on(), growth="salf", budget=12, sharpen=t) for t in (1.0, 0.2))
    for temperature, differs in ((0.0, True), (1.0, False)):
        params = SamplingParams(max_tokens=8, temperature=temperature, seed=1)
        before, after = (llm.generate(PROMPTS, params) for llm in (usual, sharper))
        assert [each.token_ids for each in before] == [each.token_ids for each in after]
        assert (mean_tree(before) != mean_tree(after)) == differs


def test_sharpened_probabilities() -> None:
    """The rest counts as tokens that are as likely as the last one: 0.5, 0.3 and two of 0.1."""
    found = sharpen_probs(np.array([[0.5, 0.3, 0.1], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]], np.float32), 0.5)
    wanted = np.array([0.25, 0.09, 0.01]) / (0.25 + 0.09 + 2 * 0.01)
    np.testing.assert_allclose(found, [wanted, [1, 0, 0], [0, 0, 0]], rtol=1e-5)
    assert found.dtype == np.float32


@pytest.mark.parametrize("budget", [1, 2, 8, 60, "auto"])
@pytest.mark.parametrize("drafter", KINDS)
def test_budgets(drafter: str, budget: int | str) -> None:
    llm = neural_llm(drafter, target_on(), budget=budget)
    for max_tokens in (1, 4):
        same_as_plain(llm, PROMPTS[:2], SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize("growth", GROWTHS)
def test_trees_reach_exactly_the_maximum_depth(growth: str) -> None:
    options = NeuralOptions(growth=growth, depth=2).growth_options()
    tree = make_growth(growth, 0, 60, options)
    while (frontier := tree.frontier()) is not None:
        size = len(frontier.tokens)
        ids = np.tile(np.arange(1, tree.width + 1, dtype=np.int32), (size, 1))
        tree.grow(ids, np.full(ids.shape, 0.9 / tree.width, dtype=np.float32))
    assert max(tree.tree().depths) == 2
