"""Warping equals transformers; draws have the given distribution and are reproducible by seed."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from draftwood.config import SamplingParams
from draftwood.errors import ModelError
from draftwood.sampling import SeededRandomness, Warper, check_drawn, draw_tokens

PROMPT = [3, 5, 3, 8]
OUTPUT = [5, 1, 1, 9, 1]


def random_logits(seed: int, vocab: int, *, ties: bool = False) -> torch.Tensor:
    logits = 4.0 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))
    return logits.round() if ties else logits


def reference(params: SamplingParams, logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
    """transformers' processors in the order of its generate; presence and frequency as OpenAI defines them."""
    hf = pytest.importorskip("transformers.generation.logits_process")
    ids = torch.tensor([[*prompt, *output]])
    scores = hf.RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty))(ids, logits[None])
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(logits))
    scores = scores - params.presence_penalty * (counts > 0) - params.frequency_penalty * counts
    for token, bias in params.logit_bias:
        scores[0, token] += bias
    scores = hf.TemperatureLogitsWarper(float(params.temperature))(ids, scores)
    if params.top_k > 0:
        scores = hf.TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1.0:
        scores = hf.TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p > 0.0:
        scores = hf.MinPLogitsWarper(params.min_p)(ids, scores)
    return torch.softmax(scores[0], dim=-1)


# ---- warps ----

COMBINATIONS: list[dict[str, Any]] = [
    dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
    for values in itertools.product((0.3, 1.0, 2.5), (0, 1, 7, 5000), (1.0, 0.9, 0.3, 1e-6), (0.0, 0.05, 1.0))
]
PENALTIES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "presence_penalty": 0.7},
    {"presence_penalty": -0.5, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3},
    {"logit_bias": {2: 3.5, 7: -100.0}},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {1: 2.0, 3: -1.5}},
]


@pytest.mark.parametrize("vocab", [11, 3000])
def test_probs_match_transformers(vocab: int) -> None:
    for index, (warp, penalty) in enumerate(itertools.product(COMBINATIONS, PENALTIES)):
        params = SamplingParams(**warp, **penalty)
        logits = random_logits(index, vocab)
        probs = Warper(params, PROMPT).probs(logits, OUTPUT)
        expected = reference(params, logits, PROMPT, OUTPUT)
        assert torch.equal(probs > 0, expected > 0), params
        torch.testing.assert_close(probs, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("warp", [{}, {"top_k": 3}, {"top_k": 40}, {"min_p": 0.1}, {"top_k": 9, "min_p": 1.0}])
def test_ties_are_kept_together_as_in_transformers(warp: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.0, **warp)
    for seed in range(20):
        logits = random_logits(seed, 200, ties=True)
        expected = reference(params, logits, [], [])
        torch.testing.assert_close(Warper(params, []).probs(logits), expected, rtol=1e-5, atol=1e-7)


def test_nucleus_prefers_lower_id_in_ties() -> None:
    probs = Warper(SamplingParams(temperature=1.0, top_p=0.5), []).probs(torch.zeros(8))
    assert probs.tolist() == [0.25] * 4 + [0.0] * 4


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 4.0])
def test_wide_nucleus_is_found(spread: float) -> None:
    """Wider than the first guess, up to the whole vocabulary."""
    params = SamplingParams(temperature=1.0, top_p=0.97)
    logits = spread * random_logits(0, 20_000)
    probs = Warper(params, []).probs(logits)
    before = torch.sort(torch.softmax(logits.double(), -1), descending=True).values.cumsum(-1)
    assert abs(int((probs > 0).sum()) - (1 + int((before < 0.97).sum()))) <= 1  # 19,400 at spread 0
    assert float(probs.sum()) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("top_k", [4, 5, 7])
def test_nucleus_prefers_lower_id_in_ties_after_top_k(top_k: int) -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, -1.0, 2.0, 1.0])
    probs = Warper(SamplingParams(temperature=1.0, top_k=top_k, top_p=0.8), []).probs(logits)
    # Three of e^2 and, since the k-th best is one of them, three of e^1; with k 7 one of e^0.
    weights = torch.tensor([math.e**2] * 3 + [math.e] * 3 + [1.0] * (top_k == 7))
    inside = 1 + int((torch.cumsum(weights / weights.sum(), 0) < 0.8).sum())
    assert set(probs.nonzero().flatten().tolist()) == set([1, 3, 6, 2, 4, 7, 0][:inside])


def test_large_tie_at_top_k_boundary_is_kept() -> None:
    logits = torch.cat((torch.zeros(3000), torch.ones(1)))
    probs = Warper(SamplingParams(temperature=1.0, top_k=2), []).probs(logits)
    assert (probs > 0).all()


@pytest.mark.parametrize("ties", [False, True])
def test_batched_rows_equal_single_rows(ties: bool) -> None:
    for index, warp in enumerate(COMBINATIONS):
        warper = Warper(SamplingParams(**warp), [])
        logits = torch.stack([spread * random_logits(index, 1500, ties=ties) for spread in (0.0, 0.01, 0.3, 1.0)])
        logits[1, 20:] = -math.inf
        together = warper.probs(logits)
        alone = torch.stack([warper.probs(row) for row in logits])
        assert torch.equal(together > 0, alone > 0), warp
        torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-8)


def test_committed_tokens_count_like_tokens_passed_in() -> None:
    logits = random_logits(0, 20)
    for penalty in PENALTIES:
        params = SamplingParams(temperature=0.8, **penalty)
        passed = Warper(params, PROMPT)
        committed = Warper(params, PROMPT)
        for cut in range(len(OUTPUT) + 1):
            expected = passed.penalise(logits, OUTPUT)
            assert torch.equal(committed.penalise(logits, OUTPUT[cut:]), expected)
            committed.commit(OUTPUT[cut : cut + 1])


def test_logits_are_not_modified() -> None:
    logits = random_logits(0, 20)
    before = logits.clone()
    for temperature, penalty in itertools.product((0.0, 0.7), PENALTIES):
        params = SamplingParams(temperature=temperature, top_k=5, top_p=0.9, min_p=0.01, **penalty)
        Warper(params, PROMPT).probs(logits, OUTPUT)
        assert torch.equal(logits, before)


def test_prompt_ids_beyond_the_output_layer_are_ignored() -> None:
    logits = random_logits(0, 20)
    params = SamplingParams(repetition_penalty=1.5)
    with_strangers = Warper(params, [*PROMPT, 20, 99]).penalise(logits)
    assert torch.equal(with_strangers, Warper(params, PROMPT).penalise(logits))


def test_temperature_zero_takes_lowest_id_of_the_best() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    warper = Warper(SamplingParams(temperature=0.0, top_p=0.5), [])
    assert warper.choice(logits) == 1
    assert warper.probs(logits).tolist() == [0.0, 1.0, 0.0, 0.0]
    penalised = Warper(SamplingParams(temperature=0.0, presence_penalty=0.5), [])
    assert penalised.choice(logits, [1]) == 2
    assert penalised.probs(logits, [1, 2]).argmax() == 1


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-45, 5e-324])
def test_the_smallest_temperatures_do_not_overflow(temperature: float) -> None:
    probs = Warper(SamplingParams(temperature=temperature, top_p=0.9), []).probs(torch.tensor([-50.0, 90.0, 89.0]))
    assert probs.tolist() == [0.0, 1.0, 0.0]


def test_impossible_tokens_stay_impossible() -> None:
    logits = torch.tensor([-math.inf, 1.0, -math.inf, 2.0])
    for warp in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.01}, {"top_k": 3, "top_p": 0.99, "min_p": 0.01}):
        probs = Warper(SamplingParams(temperature=1.0, **warp), []).probs(logits)
        assert (probs > 0).tolist() == [False, True, False, True]


@pytest.mark.parametrize("warp", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5}])
def test_nan_logits_raise_when_sampled(warp: dict[str, Any]) -> None:
    probs = Warper(SamplingParams(temperature=1.0, **warp), []).probs(torch.full((4,), math.nan))
    with pytest.raises(ModelError, match="dtype float32"):
        SeededRandomness(0).draw(probs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_widened_first(dtype: torch.dtype) -> None:
    logits = random_logits(0, 50).to(dtype)
    for temperature, penalty in itertools.product((0.0, 0.7), PENALTIES):
        warper = Warper(SamplingParams(temperature=temperature, **penalty), PROMPT)
        probs = warper.probs(logits, OUTPUT)
        assert probs.dtype == torch.float32
        assert torch.equal(probs, warper.probs(logits.float(), OUTPUT))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_result_does_not_depend_on_device() -> None:
    for index, (warp, penalty) in enumerate(itertools.product(COMBINATIONS, PENALTIES)):
        logits = random_logits(index, 3000)
        warper = Warper(SamplingParams(**warp, **penalty), PROMPT)
        on_gpu = Warper(SamplingParams(**warp, **penalty), PROMPT).probs(logits.cuda(), OUTPUT)
        assert on_gpu.is_cuda
        torch.testing.assert_close(on_gpu.cpu(), warper.probs(logits, OUTPUT), rtol=1e-4, atol=1e-6)


# ---- randomness ----


class Fixed(SeededRandomness):
    """Returns a given number instead of a random one."""

    def __init__(self, uniform: float) -> None:
        super().__init__(0)
        self._value = uniform

    def _uniform(self) -> float:
        return self._value


LARGEST = 1.0 - 2.0**-53


def test_a_seed_repeats_and_streams_differ() -> None:
    probs = torch.full((50,), 0.02)

    def draws(seed: int | None, stream: int = 0) -> list[int]:
        randomness = SeededRandomness(seed, stream)
        return [randomness.draw(probs) for _ in range(30)]

    assert draws(7) == draws(7)
    different = [draws(7), draws(8), draws(7, 1), draws(2**80), draws(None), draws(None)]
    assert len(set(map(tuple, different))) == len(different)


def test_the_numbers_of_a_seed_never_change() -> None:
    """Published outputs depend on them: on every platform, with every version of numpy and of this library."""
    randomness = SeededRandomness(0)
    probs = torch.arange(1000, dtype=torch.float64)
    assert [randomness.draw(probs) for _ in range(6)] == [971, 562, 849, 354, 650, 805]


@given(st.lists(st.sampled_from([0.0, 1e-300, 1e-45, 0.1, 0.3, 1.0, 1e30]), min_size=1, max_size=9), st.data())
def test_an_impossible_token_is_never_drawn(weights: list[float], data: st.DataObject) -> None:
    assume(any(weights))
    uniform = data.draw(st.sampled_from([0.0, LARGEST, 1.0]) | st.floats(0.0, LARGEST))
    assert weights[Fixed(uniform).draw(torch.tensor(weights, dtype=torch.float64))] > 0.0


@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, 1e-300, 1e-45, 0.1, 0.3, 1.0, 1e30]), min_size=7, max_size=7).filter(any),
        min_size=1,
        max_size=4,
    ),
    gap=st.sampled_from([0, 1, 300, 512, 1200]),
    uniform=st.sampled_from([0.0, LARGEST, 1.0]) | st.floats(0.0, LARGEST),
)
def test_an_impossible_token_is_never_drawn_in_a_batch(rows: list[list[float]], gap: int, uniform: float) -> None:
    """Its neighbours may be in other blocks."""
    probs = torch.zeros(len(rows), 7 * (gap + 1), dtype=torch.float64)
    probs[:, :: gap + 1] = torch.tensor(rows, dtype=torch.float64)
    for row, token in zip(probs, draw_tokens(probs, [uniform] * len(rows)), strict=True):
        assert row[token] > 0.0


@pytest.mark.parametrize("vocab", [1, 3, 511, 512, 513, 2000, 50_257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_batch_draws_equal_row_draws(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    probs = torch.rand(30, vocab, generator=generator, dtype=dtype) ** 9
    probs[:, 1::3] = 0.0
    numbers = SeededRandomness(vocab).upcoming(30)
    alone = [Fixed(number).draw(row) for number, row in zip(numbers, probs, strict=True)]
    assert draw_tokens(probs, numbers) == alone


@pytest.mark.parametrize("bad", [math.nan, 0.0, math.inf])
def test_row_without_total_does_not_affect_others(bad: float) -> None:
    probs = torch.full((3, 1000), 0.001)
    probs[1] = bad
    tokens = draw_tokens(probs, [0.5, 0.5, 0.25])
    assert [tokens[0], tokens[2]] == [500, 250]
    with pytest.raises(ModelError, match="dtype float32"):
        check_drawn(tokens[1])


def test_random_numbers_can_be_peeked() -> None:
    probs = torch.arange(1000.0)
    expected = SeededRandomness(5)
    draws = [expected.draw(probs) for _ in range(9)]
    randomness = SeededRandomness(5)
    numbers = randomness.upcoming(4)
    assert randomness.upcoming(2) == numbers[:2]
    assert [randomness.draw(probs) for _ in range(2)] == draws[:2]
    randomness.skip(4)  # two that were peeked and two that were not
    assert [randomness.draw(probs) for _ in range(3)] == draws[6:]


def test_probabilities_zero_and_one_are_deterministic() -> None:
    assert not Fixed(0.0).accept(0.0)
    assert Fixed(LARGEST).accept(1.0)


def test_uniform_numbers_lie_in_the_half_open_interval() -> None:
    randomness = SeededRandomness(3)
    numbers = np.array([randomness._uniform() for _ in range(20_000)])
    assert numbers.min() >= 0.0
    assert numbers.max() < 1.0
    assert abs(numbers.mean() - 0.5) < 4 * math.sqrt(1 / 12 / len(numbers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_have_the_given_distribution(dtype: torch.dtype) -> None:
    """Chi-square with a fixed seed, at five standard deviations above its mean."""
    weights = [5.0, 0.0, 1.0, 3.0, 0.5, 0.0, 2.0, 8.0]
    randomness, size = SeededRandomness(11), 20_000
    counts = Counter(randomness.draw(torch.tensor(weights, dtype=dtype)) for _ in range(size))
    expected = {token: size * weight / sum(weights) for token, weight in enumerate(weights) if weight > 0}
    assert set(counts) == set(expected)
    statistic = sum((counts[token] - mean) ** 2 / mean for token, mean in expected.items())
    freedom = len(expected) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_acceptance_has_the_given_probability() -> None:
    randomness, size = SeededRandomness(12), 20_000
    for probability in (0.01, 0.5, 0.93):
        hits = sum(randomness.accept(probability) for _ in range(size))
        assert abs(hits / size - probability) < 4 * math.sqrt(probability * (1 - probability) / size)


@pytest.mark.parametrize("vocab", [1, 511, 512, 513, 5000])
def test_draw_finds_the_token_of_a_search_over_the_whole_vocabulary(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for seed in range(50):
        weights = rng.dirichlet(np.full(vocab, 0.1)) * (rng.random(vocab) < 0.7)
        weights[rng.integers(vocab)] += 0.1
        reached = np.cumsum(weights.astype(np.float32).astype(np.float64))
        number = SeededRandomness(seed).upcoming(1)[0]
        expected = int(np.searchsorted(reached, number * reached[-1], side="right"))
        assert SeededRandomness(seed).draw(torch.from_numpy(weights.astype(np.float32))) == expected
