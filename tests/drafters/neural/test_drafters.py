"""Neural drafters through the engine: greedy output is plain output for any guesses and any batch."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from draftwood import SamplingParams
from draftwood.drafters.neural import NeuralOptions
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
