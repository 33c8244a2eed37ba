"""Many samples with neural drafters: their statistics and seeds. Exact distributions: test_sampling.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from draftwood import LLM, SamplingParams
from draftwood.drafters.neural import NeuralDrafter
from tests.tools.enumeration import assert_fits
from tests.tools.neural import (
    PROMPT,
    SOME,
    _one_thread,  # noqa: F401 - fixtures
    every_growth,
    few_llm,
    law_of,
    same_as_plain,
    with_wrong_proposals,
)

both_kinds = pytest.mark.parametrize("drafter", ["eagle", "sps"])


def samples(llm: LLM, params: SamplingParams) -> Counter[tuple[int, ...]]:
    return Counter(tuple(c.token_ids) for c in llm.generate([PROMPT], params))


@every_growth
@both_kinds
def test_drawn_children_have_the_target_distribution(drafter: str, growth: str) -> None:
    """Drawn trees through the engine, in batches."""
    warm = growth in ("beam", "static")
    params = SamplingParams(
        max_tokens=2, temperature=1.0 if warm else 0.7, top_k=6, top_p=1.0 if warm else 0.9, seed=4, n=200
    )
    llm = few_llm(drafter, SOME, growth=growth, depth=2, draw=True, budget=6, max_batch=100)
    assert_fits(samples(llm, params), law_of(llm, params, 2))


def test_statistics_detect_wrong_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control for the statistics."""
    finish = NeuralDrafter._finish
    monkeypatch.setattr(NeuralDrafter, "_finish", lambda self: with_wrong_proposals(finish(self)))
    llm = few_llm("sps", SOME, growth="chain", draw=True, budget=8, max_batch=100)
    params = SamplingParams(max_tokens=2, temperature=1.5, top_k=6, seed=4, n=400)
    with pytest.raises(AssertionError):
        assert_fits(samples(llm, params), law_of(llm, params, 2))


@every_growth
@both_kinds
def test_a_seed_gives_the_same_text_as_plain_decoding(drafter: str, growth: str) -> None:
    """For chosen children."""
    llm = few_llm(drafter, SOME, growth=growth, budget=8)
    prompts: Sequence[Any] = [PROMPT, [5], [7, 8, 9, 10, 11, 1]]
    for params in (
        SamplingParams(max_tokens=8, temperature=1.0, seed=1, n=2),
        SamplingParams(max_tokens=8, temperature=0.7, top_k=5, top_p=0.9, seed=2),
    ):
        results = same_as_plain(llm, prompts, params)
    assert drafter == "eagle" or max(c.stats.acceptance_length for c in results) > 1


def test_drawn_trees_do_not_change_greedy_output() -> None:
    for drafter in ("eagle", "sps"):
        llm = few_llm(drafter, SOME, growth="beam", draw=True, budget=8)
        same_as_plain(llm, [PROMPT, [5]], SamplingParams(max_tokens=12))
