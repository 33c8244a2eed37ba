"""The engine end to end on the tiny model: exactness, batching, stopping."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftwood import LLM, SamplingParams
from draftwood.drafters import Drafter, base, drafter_names, make_factory
from draftwood.drafters.goose import GooseOptions
from draftwood.engine import GenerationRequest, accepting, draws
from draftwood.errors import ModelError
from draftwood.sampling import UNUSABLE, Warper, draw_tokens
from draftwood.targets.base import ForwardOutput, Segment, Target
from draftwood.targets.find_top import top_rows
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import ByteTokenizer
from tests.tools.engine import (
    CHOOSING,
    DRAWING,
    PROMPTS,
    OracleDrafter,
    WildDrafter,
    law_of_pairs,
    llm,  # noqa: F401 - fixtures
    make_llm,
    reference,
)
from tests.tools.neural import NEURAL

# -- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [*CHOOSING, *DRAWING, WildDrafter])
def test_greedy_output_is_plain_decoding(llm: LLM, drafter: str | type[Drafter]) -> None:
    params = SamplingParams(max_tokens=40)
    for prompt, completion in zip(PROMPTS, llm.generate(PROMPTS, params, drafter=drafter), strict=True):
        assert completion.token_ids == reference(llm, prompt, 40)


def test_every_registered_drafter_is_tested_for_exactness() -> None:
    # A new drafter must be added to the lists of the tests.
    assert drafter_names() == sorted([*CHOOSING, *DRAWING, *NEURAL, "rest"])


@pytest.mark.parametrize("drafter", [*CHOOSING, *DRAWING, WildDrafter])
def test_batch_equals_one_by_one(llm: LLM, drafter: str | type[Drafter]) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=5)
    together = llm.generate(PROMPTS, params, drafter=drafter)
    alone = [llm.generate(prompt, params, drafter=drafter)[0] for prompt in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.prompt_index for c in together] == list(range(len(PROMPTS)))


@pytest.mark.parametrize("drafter", CHOOSING)
@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_seed_gives_same_output_with_every_choosing_drafter(llm: LLM, temperature: float, drafter: str) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, top_p=0.95, seed=11)
    plain = llm.generate(PROMPTS, params, drafter="plain")
    drafted = llm.generate(PROMPTS, params, drafter=drafter)
    assert [c.token_ids for c in plain] == [c.token_ids for c in drafted]


def answer_like_a_gpu(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits seem to be on a GPU, and it does not draw tokens itself."""
    monkeypatch.setattr(target, "info", replace(target.info, can_draw=False))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@pytest.mark.parametrize("drafter", ["plain", "goose", "stand"])
@pytest.mark.parametrize("penalty", [0.0, 0.5])
def test_a_seed_gives_the_same_output_on_a_gpu(
    llm: LLM, drafter: str, penalty: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the tokens of all nodes are drawn at once if possible."""
    params = SamplingParams(max_tokens=40, temperature=0.9, top_k=60, top_p=0.95, presence_penalty=penalty, seed=3)
    expected = llm.generate(PROMPTS, params, drafter=drafter)
    at_once = mock.Mock(wraps=draws.draw_tokens)
    monkeypatch.setattr(draws, "draw_tokens", at_once)
    answer_like_a_gpu(llm._engine.target, monkeypatch)
    assert [c.token_ids for c in llm.generate(PROMPTS, params, drafter=drafter)] == [c.token_ids for c in expected]
    assert at_once.called == (penalty == 0.0)


@pytest.mark.parametrize("most_logits", [1, 2**27])
def test_batched_draws_equal_single_draws(llm: LLM, most_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [
        SamplingParams(max_tokens=20, temperature=0.9, seed=1),
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=20, temperature=0.9, seed=2, logprobs=2),
        SamplingParams(max_tokens=16, temperature=0.7, top_p=0.9, seed=3),
        SamplingParams(max_tokens=22, temperature=0.9, frequency_penalty=0.5, seed=4),
        SamplingParams(max_tokens=18, temperature=0.9, seed=5),
    ]
    alone = [llm.generate(PROMPTS[0], params, drafter="goose")[0] for params in kinds]
    monkeypatch.setattr(draws, "MAX_LOGITS", most_logits)
    answer_like_a_gpu(llm._engine.target, monkeypatch)
    engine, factory = llm._engine, make_factory("goose", None, llm._engine.target, codec=llm.tokenizer)
    prompt_ids = llm.tokenizer.encode(PROMPTS[0])
    ids = [
        engine.submit(GenerationRequest(prompt_ids=tuple(prompt_ids), params=params, drafter=factory))[0]
        for params in kinds
    ]
    found: dict[int, list[int]] = {request_id: [] for request_id in ids}
    for event in engine.events(ids):
        found[event.request_id] += event.token_ids
    assert list(found.values()) == [list(c.token_ids) for c in alone]


class DrawingTarget:
    """Lets a target draw sampled tokens itself, as the GPU decoder does."""

    def __init__(self, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_drawn = 0
        self.spoils_reached = False
        self._forward = target.forward
        monkeypatch.setattr(target, "info", replace(target.info, can_draw=True))
        monkeypatch.setattr(target, "forward", self.forward)

    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        output = self._forward(segments)
        drawn, first = np.full(len(output.logits), -99, np.int32), 0
        for segment in segments:
            rows, first = slice(first, first + segment.num_logits), first + segment.num_logits
            if segment.draw is not None:
                temperature, top_k, top_p, min_p = segment.draw.rule
                params = SamplingParams(temperature=temperature, top_k=int(top_k), top_p=top_p, min_p=min_p)
                tokens = draw_tokens(Warper(params, ()).probs(output.logits[rows]), segment.draw.numbers())
                self.num_drawn += len(tokens)
                reached = reached_nodes(segment, tokens)
                drawn[rows] = [
                    UNUSABLE if (node in reached) == self.spoils_reached else token for node, token in enumerate(tokens)
                ]
        return output._replace(drawn=drawn)


def reached_nodes(segment: Segment, tokens: Sequence[int]) -> set[int]:
    reached = {0}
    for node, (token, parent) in enumerate(zip(segment.token_ids, segment.parents, strict=True)):
        if parent in reached and tokens[parent] == token:
            reached.add(node)
    return reached


@pytest.mark.parametrize("has_core", [True, False])
@pytest.mark.parametrize("drafter", ["plain", "goose", "stand"])
def test_a_target_may_draw_itself(llm: LLM, drafter: str, has_core: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [
        SamplingParams(max_tokens=20, temperature=0.9, top_p=0.9, seed=1),
        SamplingParams(max_tokens=20, temperature=0.9, seed=2, logprobs=2),
        SamplingParams(max_tokens=16, temperature=0.7, top_k=9, min_p=0.1, seed=3),
        SamplingParams(max_tokens=22, temperature=0.9, frequency_penalty=0.5, seed=4),
        SamplingParams(max_tokens=24),
    ]
    expected = [[c.token_ids for c in llm.generate(PROMPTS, params, drafter=drafter)] for params in kinds]
    target = DrawingTarget(llm._engine.target, monkeypatch)
    if not has_core:
        monkeypatch.setattr(accepting, "load_core", lambda: None)
    for params, texts in zip(kinds, expected, strict=True):
        target.num_drawn = 0
        assert [c.token_ids for c in llm.generate(PROMPTS, params, drafter=drafter)] == texts
        assert bool(target.num_drawn) == (not params.is_greedy and not params.has_penalties)


@pytest.mark.parametrize("drafter", ["plain", "goose"])
def test_a_token_that_cannot_be_drawn_is_an_error(llm: LLM, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a node that is reached: what is drawn after others does not matter, see ``DrawingTarget``."""
    target = DrawingTarget(llm._engine.target, monkeypatch)
    target.spoils_reached = True
    with pytest.raises(ModelError, match="invalid probabilities"):
        llm.generate(PROMPTS[0], SamplingParams(temperature=0.3, seed=1), drafter=drafter)


def test_drawing_time_is_charged_to_sampled_requests(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    now, drawing = 0.0, draws.draw_tokens

    def slowly(probs: torch.Tensor, numbers: Sequence[float]) -> list[int]:
        nonlocal now
        now += 3.0
        return drawing(probs, numbers)

    answer_like_a_gpu(llm._engine.target, monkeypatch)
    monkeypatch.setattr(draws, "draw_tokens", slowly)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    engine, factory = llm._engine, make_factory("plain", None, llm._engine.target, codec=llm.tokenizer)
    kinds = [SamplingParams(max_tokens=5, ignore_eos=True, temperature=t, seed=1) for t in (0.9, 0.0, 0.9)]
    ids = [engine.submit(GenerationRequest(prompt_ids=(65,), params=params, drafter=factory))[0] for params in kinds]
    stats = {event.request_id: event.stats for event in engine.events(ids)}
    assert [stats[request_id].accept_seconds for request_id in ids] == [7.5, 0.0, 7.5]


def test_top_rows_of_the_pass_are_reused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked = llm._engine.target, list[int]()
    forward = target.forward

    def forward_with_top(segments: Sequence[Segment]) -> ForwardOutput:
        output = forward(segments)
        return output._replace(top=top_rows(output.logits, asked[-1])) if asked[-1] else output

    params = SamplingParams(max_tokens=30)
    expected = llm.generate(PROMPTS, params, drafter="goose")
    monkeypatch.setattr(target, "set_top", asked.append)
    monkeypatch.setattr(target, "forward", forward_with_top)
    monkeypatch.setattr(base, "top_rows", mock.Mock(side_effect=AssertionError("found already")))
    found = llm.generate(PROMPTS, params, drafter="goose")
    assert [(c.token_ids, c.stats.cycles) for c in found] == [(c.token_ids, c.stats.cycles) for c in expected]
    assert set(asked) == {GooseOptions().top_k}
    llm.generate(PROMPTS, params, drafter="plain")
    assert asked[-1] == 0


def test_penalties_follow_the_path_inside_a_tree(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=40, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, logprobs=1
    )
    plain = OracleDrafter.learn(llm, PROMPTS, params)
    oracle = llm.generate(PROMPTS, params, drafter=OracleDrafter)
    assert [c.token_ids for c in plain] == [c.token_ids for c in oracle]
    assert all(c.stats.acceptance_length > 4 for c in oracle)
    assert len(set(plain[0].token_ids)) > 20  # the penalties had an effect


def test_oracle_accepts_everything(llm: LLM) -> None:
    params = SamplingParams(max_tokens=36, ignore_eos=True)
    (plain,) = OracleDrafter.learn(llm, PROMPTS[:1], params)
    oracle = llm.generate(PROMPTS[0], params, drafter=OracleDrafter)[0]
    assert oracle.token_ids == plain.token_ids
    assert oracle.stats.cycles == 6  # five guesses and the bonus token per cycle
    assert oracle.stats.acceptance_by_depth() == [1.0] * 5
    assert oracle.sources[:6] == ["oracle"] * 5 + ["target"]
    assert oracle.stats.accepted_by_source == Counter(oracle=30)


@pytest.mark.parametrize("drafter", ["plain", WildDrafter])
def test_sampled_tokens_have_the_target_distribution(drafter: str | type[Drafter]) -> None:
    """Chi-square test of the first two tokens over many seeds against the model's probabilities."""
    llm = make_llm(drafter=drafter, max_batch=64)
    prompt = llm.tokenizer.encode("to")
    warm, keep = 1.5, 6
    expected = law_of_pairs(llm, prompt, warm, keep)
    runs = 1500
    params = SamplingParams(max_tokens=2, temperature=warm, top_k=keep, seed=1, n=runs, ignore_eos=True)
    seen = Counter(tuple(c.token_ids) for c in llm.generate([prompt], params))
    assert set(seen) <= set(expected)
    common = {pair: p for pair, p in expected.items() if p * runs >= 5}
    rest = 1.0 - sum(common.values())
    cells = [(seen[pair], p * runs) for pair, p in common.items()]
    cells.append((runs - sum(n for n, _ in cells), rest * runs))
    statistic = sum((n - e) ** 2 / e for n, e in cells if e > 1)
    freedom = len(cells) - 1
    # Wilson-Hilferty: the cube root of a chi-square is nearly normal. The seed is fixed; 4 sigma are 1 in 30,000.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert freedom > 10
    assert z < 4


# -- batching --------------------------------------------------------------------------------------------------------


def test_continuous_admission_runs_more_prompts_than_rows() -> None:
    llm = make_llm(max_batch=2, drafter="pld")
    params = SamplingParams(max_tokens=20)
    prompts = PROMPTS * 3
    results = llm.generate(prompts, params)
    assert [c.token_ids for c in results] == [reference(llm, prompt, 20) for prompt in prompts]


def test_admission_waits_for_cache_slots() -> None:
    target = tiny_target(cache_tokens=160)
    llm = LLM.from_target(target, ByteTokenizer(), drafter="pld", budget=8)
    prompts = ["p" * 60, "q" * 60, "r" * 60]
    results = llm.generate(prompts, SamplingParams(max_tokens=30))
    assert [c.token_ids for c in results] == [reference(llm, prompt, 30) for prompt in prompts]
    assert target.can_open(160)


@pytest.mark.parametrize("max_batch", [1, 4, 8])
def test_samples_of_one_prompt_share_its_prefill(max_batch: int) -> None:
    llm = make_llm(max_batch=max_batch, prefill_chunk=16)
    prompt = "shared prompt " * 5
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=2, n=6)
    samples = llm.generate(prompt, params)
    assert [c.index for c in samples] == list(range(6))
    assert [c.stats.reused_tokens > 0 for c in samples] == [False] + [True] * 5
    assert len({tuple(c.token_ids) for c in samples}) > 3
    assert (
        samples[0].token_ids
        == llm.generate(prompt, SamplingParams(max_tokens=12, temperature=1.0, seed=2))[0].token_ids
    )
    llm.close()  # a prefix may still be kept for a further sample
    assert llm._engine.target.can_open(4096)


@pytest.mark.parametrize("chunk", [1, 7, 512])
def test_prefill_chunks_do_not_change_the_output(chunk: int) -> None:
    llm = make_llm(prefill_chunk=chunk, drafter="pld")
    assert llm.generate(PROMPTS[3], SamplingParams(max_tokens=20))[0].token_ids == reference(llm, PROMPTS[3], 20)


# -- stopping --------------------------------------------------------------------------------------------------------


def oracle_llm(prompt: str, params: SamplingParams) -> tuple[LLM, list[int]]:
    """A model whose drafter makes every block long, and the unstopped plain output."""
    llm = make_llm(drafter=OracleDrafter, budget=24)
    return llm, OracleDrafter.learn(llm, [prompt], params)[0].token_ids


@given(st.integers(1, 30))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_length_limit_cuts_inside_a_block(limit: int) -> None:
    llm, plain = oracle_llm("cut me", SamplingParams(max_tokens=40, ignore_eos=True))
    got = llm.generate("cut me", SamplingParams(max_tokens=limit, ignore_eos=True))[0]
    assert got.token_ids == plain[:limit]
    assert got.finish_reason == "length"
    assert llm._engine.target.can_open(4096)


@given(st.integers(0, 20))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_stop_token_cuts_inside_a_block(at: int) -> None:
    llm, plain = oracle_llm("stop me", SamplingParams(max_tokens=40, ignore_eos=True))
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(plain[at],))
    got = llm.generate("stop me", params)[0]
    assert got.token_ids == plain[: plain.index(plain[at]) + 1]
    assert got.finish_reason == "stop"
    assert got.text == llm.tokenizer.decode(got.token_ids[:-1])


def test_stop_string_cuts_inside_a_block_and_is_not_streamed() -> None:
    free = SamplingParams(max_tokens=40, ignore_eos=True, repetition_penalty=1.5)
    llm, plain = oracle_llm("string", free)
    text = llm.tokenizer.decode(plain)
    stop = text[9:12]
    params = SamplingParams(max_tokens=40, ignore_eos=True, repetition_penalty=1.5, stop=(stop, "never there"))
    got = llm.generate("string", params)[0]
    assert got.finish_reason == "stop"
    assert got.text == text[: text.index(stop)]
    assert "".join(event.text for event in llm.stream("string", params)) == got.text
    assert got.token_ids == llm.generate("string", params, drafter="plain")[0].token_ids


def test_context_limit_ends_with_length(llm: LLM) -> None:
    prompt = [65] * 1000
    got = llm.generate([prompt], SamplingParams(max_tokens=200, ignore_eos=True), drafter="pld")[0]
    assert len(got.token_ids) == 24
    assert got.finish_reason == "length"
