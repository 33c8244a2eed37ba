"""What tokens that were drawn after rows of logits must be like.

The reference is the distribution of ``Warper`` in float64. Kernels round otherwise, so a number within EDGE of the
border between two tokens may give either of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from hypothesis import strategies as st

from draftwood.config import SamplingParams
from draftwood.sampling import UNUSABLE, Warper
from tests.tools.top import INF, random_rows, rows_with_nan

EDGE = 1e-5  # of the whole probability
RULES = {
    "plain": {"temperature": 1.0},
    "warm": {"temperature": 0.7},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.01},
    "top-k": {"temperature": 0.9, "top_k": 20},
    "one": {"temperature": 1.0, "top_k": 1},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "nearly all": {"temperature": 1.0, "top_p": 0.99999},
    "nearly none": {"temperature": 1.0, "top_p": 1e-6},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "all of them": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    "more than there are": {"temperature": 1.0, "top_k": 10**6, "top_p": 0.5},
}
NUMBERS = (0.0, 0.123, 0.5, 0.875, 1.0 - 2.0**-53)


class DrawTokens(Protocol):
    def __call__(
        self,
        logits: torch.Tensor,
        rules: Sequence[SamplingParams],
        numbers: Sequence[float],
        rows: Sequence[int] | None = None,
        /,
    ) -> list[int]:
        """The tokens after rows of ``logits [n, V]``: after each, or after the given ones."""


def check(logits: torch.Tensor, rule: SamplingParams, numbers: Sequence[float], tokens: Sequence[int]) -> None:
    """Each number lies within the share of its token, or near its edges."""
    for row, number, token in zip(logits, numbers, tokens, strict=True):
        probs = Warper(rule, ()).probs(row).double().numpy()
        probs /= probs.sum()
        reached = np.cumsum(probs)
        assert probs[token] > 0.0, (token, number)
        assert reached[token] - probs[token] - EDGE <= number <= reached[token] + EDGE, (token, number)


def ambiguous(logits: torch.Tensor, params: SamplingParams) -> bool:
    """Whether rounding decides which tokens the rule keeps."""
    scores = torch.softmax(logits.double() / params.temperature, dim=-1).sort(dim=-1, descending=True).values
    if 0 < params.top_k < logits.shape[1]:
        scores = torch.where(scores >= scores[:, params.top_k - 1, None], scores, 0.0)
    shares = (scores / scores.sum(dim=-1, keepdim=True)).cumsum(dim=-1)
    ratios = scores / scores[:, :1]
    return bool(((shares - params.top_p).abs() < EDGE).any() or ((ratios - params.min_p).abs() < EDGE).any())


def check_random_rule(data: st.DataObject, draw: DrawTokens) -> None:
    scale, vocab_size = data.draw(st.sampled_from([0.01, 1.0, 4.0, 30.0])), data.draw(st.integers(2, 700))
    logits = random_rows(3, vocab_size, scale)
    if data.draw(st.booleans()):
        logits = logits.round()  # ties
    params = SamplingParams(
        temperature=data.draw(st.floats(0.05, 3.0)),
        top_k=data.draw(st.integers(0, vocab_size + 3)),
        top_p=data.draw(st.floats(0.01, 1.0)),
        min_p=data.draw(st.sampled_from([0.0, 0.01, 0.3, 1.0])),
    )
    numbers = data.draw(st.lists(st.floats(0.0, 1.0, exclude_max=True), min_size=3, max_size=3))
    tokens = draw(logits, [params] * 3, numbers)
    if not ambiguous(logits, params):
        check(logits, params, numbers, tokens)


def check_shares(draw: DrawTokens, rules: Sequence[str], count: int) -> None:
    """Numbers at equal distances draw each token as often as it is likely."""
    logits = random_rows(1, 40, scale=1.5)
    for rule in rules:
        params = SamplingParams(**RULES[rule])
        numbers = [(index + 0.5) / count for index in range(count)]
        tokens = draw(logits, [params] * count, numbers, [0] * count)
        counts = np.bincount(tokens, minlength=40)
        expected = Warper(params, ()).probs(logits[0]).double().numpy() * count
        assert np.abs(counts - expected).max() <= 1.0 + EDGE * count, rule
        assert tokens == sorted(tokens)


def check_ties(draw: DrawTokens) -> None:
    logits = torch.zeros(4, 1000)
    logits[:, [3, 400, 999]] = 1.0
    half = SamplingParams(temperature=1.0, top_k=3, top_p=0.5)  # two of the three
    assert draw(logits, [half] * 4, [0.0, 0.49, 0.51, 0.99]) == [3, 3, 400, 400]
    third = SamplingParams(temperature=1.0, top_k=2)  # ties with the second best are kept
    assert draw(logits, [third] * 4, [0.1, 0.4, 0.7, 0.99]) == [3, 400, 999, 999]


def check_rows_alone(draw: DrawTokens) -> tuple[torch.Tensor, list[SamplingParams], list[float], list[int]]:
    """A draw depends on its row alone. Returns logits, rules, numbers and tokens."""
    logits, rng = random_rows(6, 2500, scale=2.0), random.Random(1)
    rules = [SamplingParams(**rng.choice(list(RULES.values()))) for _ in logits]
    numbers = [rng.random() for _ in logits]
    together = draw(logits, rules, numbers)
    for rows in ([3], [5, 0], [1, 2, 4]):
        alone = draw(logits, [rules[row] for row in rows], [numbers[row] for row in rows], rows)
        assert alone == [together[row] for row in rows]
    return logits, rules, numbers, together


def check_unusable(draw: DrawTokens) -> None:
    """Rows without a finite best logit; a logit that is not a number is never drawn."""
    logits = torch.stack([random_rows(1, 300)[0], torch.full((300,), -INF), random_rows(1, 300)[0]])
    logits[2, 17] = INF
    for rule in RULES.values():
        first, *others = draw(logits, [SamplingParams(**rule)] * 3, [0.3] * 3)
        assert first >= 0
        assert others == [UNUSABLE, UNUSABLE]
    logits, _ = rows_with_nan()
    tokens = draw(logits, [SamplingParams(temperature=1.0)] * 5, [0.4] * 5)
    assert tokens[0] == UNUSABLE
    assert all(bool(logits[row, token].isfinite()) for row, token in enumerate(tokens) if row)
