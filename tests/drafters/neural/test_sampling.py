"""Sampling with neural drafters: for any chosen or drawn tree, tokens have the target's distribution.

Enumerates all random outcomes of drafter and verifier, on a vocabulary of a few tokens.
Statistics over many samples: test_samples.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.drafters.neural import NeuralDrafter
from draftwood.growth.drawn import Draw, Probs, choose_best
from tests.tools.enumeration import Branching, Law, decide_in_engine, difference, outcomes
from tests.tools.neural import (
    FEW,
    PROMPT,
    _one_thread,  # noqa: F401 - fixtures
    every_growth,
    few_llm,
    law_of,
    with_wrong_proposals,
)

chosen_or_drawn = pytest.mark.parametrize("draw", [False, True])
both_kinds = pytest.mark.parametrize("drafter", ["eagle", "sps"])


def draw_by(chance: Branching, idle: Callable[[], bool]) -> Draw:
    """Draw sequentially without replacement by ``chance``. ``idle``: the result is not used."""

    def draw_row(probs: Probs, wanted: int) -> list[int]:
        left = probs.astype(np.float64)
        order: list[int] = []
        for _ in range(min(wanted, int(np.count_nonzero(left)))):
            order.append(chance.draw(torch.from_numpy(left)))
            left[order[-1]] = 0.0
        return order

    def draw(probs: Probs, wanted: Sequence[int]) -> Sequence[Sequence[int]]:
        if idle():
            return choose_best(probs, wanted)
        return [draw_row(row, count) for row, count in zip(probs, wanted, strict=True)]

    return draw


@contextmanager
def patch_randomness(chance: Branching, idle: Callable[[], bool]) -> Iterator[None]:
    """Replace the randomness of the engine and of drawing drafters."""
    with pytest.MonkeyPatch.context() as patch:
        decide_in_engine(chance, patch)
        make_draw = NeuralDrafter.begin.__globals__["make_draw"]
        patch.setattr(
            "draftwood.drafters.neural.make_draw",
            lambda name, rng: make_draw(name, rng) if name == "chosen" else draw_by(chance, idle),
        )
        yield


def enumerated(llm: LLM, params: SamplingParams) -> tuple[Law, int]:
    """The distribution of the output over all outcomes, and the maximum number of tokens per cycle."""
    law: Law = defaultdict(float)
    longest = 0

    def experiment(chance: Branching) -> tuple[int, ...]:
        nonlocal longest
        tokens: list[int] = []
        with patch_randomness(chance, idle=lambda: len(tokens) == params.max_tokens - 1):  # only the root is left
            for event in llm.stream(PROMPT, params):
                tokens += event.token_ids
                longest = max(longest, len(event.token_ids))
        return tuple(tokens)

    for output, weight in outcomes(experiment):
        law[output] += weight
    return law, longest


WARM = SamplingParams(temperature=1.0, max_tokens=2)
WARPED = SamplingParams(temperature=0.7, top_k=2, top_p=0.98, max_tokens=2)


@every_growth
@chosen_or_drawn
@both_kinds
def test_distribution_of_two_tokens(drafter: str, draw: bool, growth: str) -> None:
    llm = few_llm(drafter, FEW, growth=growth, draw=draw, budget=3, top_k=2, threshold=0.0)
    law, longest = enumerated(llm, WARM)
    assert sum(law.values()) == pytest.approx(1.0)
    assert difference(law, law_of(llm, WARM, 2)) < 1e-5
    assert longest == 2


@chosen_or_drawn
@pytest.mark.parametrize("drafter", ["eagle", "sps"])
def test_distribution_with_sampling_filters(drafter: str, draw: bool) -> None:
    llm = few_llm(drafter, FEW, growth="beam", draw=draw, budget=4, top_k=2)
    law, _ = enumerated(llm, WARPED)
    assert difference(law, law_of(llm, WARPED, 2)) < 1e-5


def test_three_tokens_of_a_drawn_chain() -> None:
    params = replace(WARPED, max_tokens=3)
    llm = few_llm("sps", FEW, growth="chain", depth=2, draw=True, budget=3)
    law, longest = enumerated(llm, params)
    assert difference(law, law_of(llm, params, 3)) < 1e-5
    assert longest == 3


def test_enumeration_detects_wrong_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a drafter that does not state its proposal distribution."""
    finish = NeuralDrafter._finish
    monkeypatch.setattr(NeuralDrafter, "_finish", lambda self: with_wrong_proposals(finish(self)))
    llm = few_llm("sps", FEW, growth="chain", draw=True, budget=3)
    law, _ = enumerated(llm, WARM)
    assert difference(law, law_of(llm, WARM, 2)) > 0.01
