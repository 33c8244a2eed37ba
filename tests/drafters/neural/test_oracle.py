"""Neural drafters that are always right: their trees are accepted to their full depth."""

from __future__ import annotations

import pytest

from draftwood import LLM, SamplingParams
from draftwood.drafters.shapes import static_tree
from draftwood.targets.tiny import TINY_CONFIG
from tests.tools.neural import (
    KIND_OF,
    _one_thread,  # noqa: F401 - fixtures
    clock_target,
    clock_text,
    every_growth,
    following,
    neural_llm,
    perfect_head,
    random_target,
    same_as_plain,
    saved_head,
    tau,
)

BUDGET = 20
PROMPTS = [clock_text(3, 5), clock_text(9, 2), clock_text(0, 30)]


def expected_tau(growth: str, ahead: int | None = None) -> int:
    """Tokens of a fully accepted cycle. ``ahead``: number of tokens that multi-token heads predict."""
    static = max(static_tree("heuristic").first(BUDGET).depths)
    depth = {"chain": 7, "static": static, "beam": 7}.get(growth, BUDGET - 1)
    return 1 + (depth if ahead is None else min(depth, ahead))


@every_growth
@pytest.mark.parametrize("drafter", KIND_OF)
def test_all_guesses_of_a_perfect_head_are_accepted(drafter: str, growth: str) -> None:
    kind = KIND_OF[drafter]
    size = expected_tau(growth, 4 if kind in ("medusa", "hydra") else None)
    llm = neural_llm(drafter, clock_target(), head=saved_head(perfect_head(kind)), growth=growth, budget=BUDGET)
    results = llm.generate(PROMPTS, SamplingParams(max_tokens=4 * size))
    assert [c.token_ids for c in results] == [clock_text(following(prompt[-1]), 4 * size) for prompt in PROMPTS]
    assert [c.stats.cycles for c in results] == [4] * len(PROMPTS)
    assert set(results[0].sources) == {drafter, "target"}


@pytest.mark.parametrize("depth", [1, 3, 12])
def test_chain_has_requested_depth(depth: int) -> None:
    head = saved_head(perfect_head("eagle"))
    llm = neural_llm("eagle2", clock_target(), head=head, growth="chain", depth=depth, budget=BUDGET)
    results = llm.generate(PROMPTS, SamplingParams(max_tokens=3 * (depth + 1)))
    assert tau(results) == depth + 1


def test_budget_limits_chain() -> None:
    llm = neural_llm("eagle2", clock_target(), head=saved_head(perfect_head("eagle")), growth="chain", budget=5)
    assert tau(llm.generate(PROMPTS, SamplingParams(max_tokens=20))) == 5


@every_growth
def test_draft_vocabulary_that_covers_all_tokens(growth: str) -> None:
    """Half of the cycle of tokens in any order; outside of it, no guess can be right."""
    size = expected_tau(growth)
    known = clock_text(following(5), 14)
    head = saved_head(perfect_head("eagle3", tokens=sorted(known)))
    llm = neural_llm("eagle3", clock_target(), head=head, growth=growth, budget=BUDGET)
    inside = llm.generate([[5]], SamplingParams(max_tokens=1))[0].token_ids
    assert inside == [known[0]]
    whole = llm.generate([[5, known[0]]], SamplingParams(max_tokens=13))[0]
    assert whole.token_ids == known[1:]
    assert whole.stats.cycles == -(-13 // size)
    outside = llm.generate([[known[-2], known[-1]]], SamplingParams(max_tokens=5))[0]
    assert outside.token_ids == clock_text(following(known[-1]), 5)
    assert outside.stats.cycles == 5


@every_growth
@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_the_target_itself_as_a_draft_model(growth: str, backend: str) -> None:
    """A random model has low confidence, so wide trees are shallower than a chain of the same size."""
    llm = neural_llm(
        "sps",
        random_target(backend=backend),
        model=lambda **kwargs: random_target(backend=backend, **kwargs),
        growth=growth,
        budget=BUDGET,
        threshold=0.0,
    )
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    results = same_as_plain(llm, ["hello", "x" * 30][: 2 if backend == "auto" else 1], params)
    if growth in ("chain", "static"):
        assert tau(results) == expected_tau(growth)
    else:
        assert tau(results) > 2.5


def test_the_built_in_model_drafts_for_itself() -> None:
    llm = LLM("tiny", drafter="sps", drafter_options={"model": "tiny", "growth": "chain"}, budget=8)
    results = llm.generate(["hello", "abc abc"], SamplingParams(max_tokens=40, ignore_eos=True))
    assert tau(results) == 8
    assert llm.info.num_layers == TINY_CONFIG.num_layers
