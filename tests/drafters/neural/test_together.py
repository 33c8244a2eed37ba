"""Neural drafters in batches: their cache, number formats and targets, and shared passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.drafters import make_factory
from draftwood.drafters.heads import Eagle2Drafter
from draftwood.engine import GenerationRequest
from draftwood.sources.neural.base import DraftModel, DraftSegment
from draftwood.sources.neural.head import HeadModel
from draftwood.targets.native.cpu import CpuDecoder
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.toprows import TopRows
from draftwood.text.bytes import ByteTokenizer
from draftwood.tree import DraftTree
from tests.tools.head import random_head
from tests.tools.neural import (
    CLOCK,
    CONFIG,
    KIND_OF,
    KINDS,
    _one_thread,  # noqa: F401 - fixtures
    clock_target,
    clock_text,
    draft_model,
    drafters_of,
    following,
    head_folder,
    is_empty,
    mean_tree,
    neural_llm,
    perfect_llm,
    random_target,
    same_as_plain,
    saved_head,
    tau,
)

PROMPTS = ["hello hello hello", [7], [7, 8], "the cat sat on the mat, the cat sat"]
fused_cpu = pytest.mark.skipif(not CpuDecoder.is_available(), reason=f"no kernel: {CpuDecoder.why_unavailable()}")


@cache
def target_on() -> NativeTarget:
    return random_target()


# -- the draft cache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["eagle2", "eagle3", "medusa", "sps"])
def test_closed_stream_frees_the_draft_cache(drafter: str) -> None:
    llm = neural_llm(drafter, target_on())
    for number, _ in enumerate(llm.stream("go on for long", SamplingParams(max_tokens=200))):
        assert not is_empty(llm)
        if number == 3:
            break
    assert is_empty(llm)
    stream = llm.stream("x" * 300, SamplingParams(max_tokens=200))
    next(stream)
    llm.close()
    assert is_empty(llm)


@pytest.mark.parametrize("drafter", ["eagle2", "medusa", "sps"])
def test_full_draft_cache_disables_drafting(drafter: str) -> None:
    llm = perfect_llm(drafter, growth="chain")
    model = draft_model(llm)
    book = model._cache if isinstance(model, HeadModel) else model.target.cache  # type: ignore[attr-defined]
    taken = book.open(book.num_slots - 200)
    params = SamplingParams(max_tokens=32)
    prompts = [clock_text(start, 4) for start in (1, 2, 3)]
    results = llm.generate(prompts, params)
    assert [c.token_ids for c in results] == [clock_text(following(prompt[-1]), 32) for prompt in prompts]
    assert results[0].stats.acceptance_length > 4  # there is space for one of them
    assert [c.stats.acceptance_length for c in results[1:]] == [1, 1]
    book.close(taken)
    assert is_empty(llm)
    assert tau(llm.generate(prompts, params)) > 4


@pytest.mark.parametrize("drafter", ["eagle2", "eagle3", "sps"])
def test_a_generous_max_tokens_leaves_room_for_others(drafter: str) -> None:
    """A max_tokens beyond the context does not reserve cache, whatever the capacity of the draft model."""
    llm = perfect_llm(drafter, growth="chain", model=partial(clock_target, replace(CLOCK, context_length=1 << 17)))
    params = SamplingParams(max_tokens=1_000_000, stop_token_ids=(clock_text(0, 24)[-1],))
    results = llm.generate([clock_text(start, 3) for start in (0, 5, 22, 3)], params)
    assert min(c.stats.acceptance_length for c in results) > 3


def test_a_draft_model_with_a_short_context() -> None:
    """Drafts end at its context limit; the text continues."""
    llm = perfect_llm("sps", model=partial(clock_target, replace(CLOCK, context_length=80)), growth="chain")
    assert draft_model(llm).max_positions == 80
    prompt = clock_text(3, 4)
    trees = [event.tree for event in llm.stream(prompt, SamplingParams(max_tokens=96))]
    text = len(prompt)
    for tree in trees:
        assert len(tree) == (1 if text >= 80 else min(8, 80 - text + 2))
        text += len(tree)
    assert text == 4 + 96
    long = llm.generate([clock_text(2, 90)], SamplingParams(max_tokens=8))[0]
    assert long.token_ids == clock_text(2, 98)[90:]
    assert long.stats.drafted_nodes == 0
    assert is_empty(llm)


def test_a_draft_model_with_more_tokens() -> None:
    """Vocabularies of one family are padded differently: tokens unknown to the target are never drafted."""
    wide = replace(CONFIG, vocab_size=CONFIG.vocab_size + 62)
    llm = neural_llm("sps", target_on(), model=lambda **kwargs: random_target(wide, **kwargs), top_k=64, budget=60)
    same_as_plain(llm, PROMPTS, SamplingParams(max_tokens=10))
    params = SamplingParams(max_tokens=10, temperature=1.0, seed=1)
    for draw in (False, True):
        llm = neural_llm("sps", target_on(), model=lambda **kwargs: random_target(wide, **kwargs), draw=draw)
        assert all(token < CONFIG.vocab_size for c in llm.generate(PROMPTS, params) for token in c.token_ids)


@pytest.mark.parametrize("backend", ["eager", "auto"])
def test_a_draft_model_with_fewer_tokens(backend: str) -> None:
    """Tokens unknown to the draft model may still occur in a text, from its first token on."""
    narrow = replace(CONFIG, vocab_size=CONFIG.vocab_size - 8)
    llm = neural_llm("sps", target_on(), model=partial(random_target, narrow, backend=backend))
    results = same_as_plain(llm, ["hello", [257, 5, 251], [251]], SamplingParams(max_tokens=10, ignore_eos=True))
    assert mean_tree(results) > 1


# -- number formats and other targets --------------------------------------------------------------------------------


@fused_cpu
@pytest.mark.parametrize("drafter", KINDS)
def test_bfloat16(drafter: str) -> None:
    target = random_target(dtype=torch.bfloat16)
    llm = neural_llm(drafter, target, model=lambda **kwargs: random_target(noise=0.02, dtype=torch.bfloat16, **kwargs))
    results = same_as_plain(llm, PROMPTS, SamplingParams(max_tokens=12))
    assert mean_tree(results) > 1


@pytest.mark.parametrize("drafter", ["eagle3", "sps"])
def test_a_transformers_target(drafter: str) -> None:
    pytest.importorskip("transformers")
    from tests.tools import hf as hf_tools

    target: Any = hf_tools.target_of("llama")
    shape = replace(CONFIG, vocab_size=hf_tools.VOCAB, hidden_size=32, num_layers=hf_tools.LAYERS, num_heads=2)
    head = None if drafter == "sps" else saved_head(random_head(KIND_OF[drafter], shape))
    draft: Any = hf_tools.HFTarget(hf_tools.build(hf_tools.CONFIGS["llama"]()), max_batch=16)
    llm = neural_llm(drafter, target, head=head, model=lambda **_: draft, max_batch=2, prefill_chunk=4)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    prompts = [[5, 6, 7, 8, 9, 10, 11], [4], [30, 31]]
    results = llm.generate(prompts, params)
    plain = llm.generate(prompts, params, drafter="plain")
    assert [c.token_ids for c in results] == [c.token_ids for c in plain]
    assert mean_tree(results) > 1


# -- a batch is drafted together -------------------------------------------------------------------------------------


def count_passes(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of requests of every draft pass."""
    seen: list[int] = []
    forward = type(draft_model(llm)).forward

    def counted(self: DraftModel, segments: Sequence[DraftSegment], k: int) -> TopRows:
        seen.append(len(segments))
        return forward(self, segments, k)

    monkeypatch.setattr(type(draft_model(llm)), "forward", counted)
    return seen


@pytest.mark.parametrize("drafter", ["eagle2", "eagle3", "hydra", "sps"])
def test_batch_needs_as_many_draft_passes_as_one_request(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = perfect_llm(drafter, growth="chain", depth=4)
    prompts = [clock_text(start, 4) for start in (1, 2, 3, 4)]
    params = SamplingParams(max_tokens=20)
    seen = count_passes(llm, monkeypatch)
    alone = [llm.generate([prompt], params)[0].token_ids for prompt in prompts]
    num_alone = len(seen)
    seen.clear()
    together = [c.token_ids for c in llm.generate(prompts, params)]
    assert together == alone
    reads = seen.count(1) if drafter != "sps" else 0  # for their prompts, one by one
    assert reads <= len(prompts)
    assert seen.count(4) == len(seen) - reads == (num_alone - reads) // 4 == 16


@pytest.mark.parametrize("drafter", ["eagle2", "eagle3", "medusa", "sps"])
def test_batch_equals_one_by_one(drafter: str) -> None:
    llm = neural_llm(drafter, target_on(), growth="beam", draw=True)
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=5)
    together = llm.generate(PROMPTS, params)
    alone = [llm.generate([prompt], params)[0] for prompt in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]


def test_batch_with_drafters_of_all_kinds() -> None:
    """Each drafter gets its own hidden states out of those computed for all."""
    target = target_on()
    llm = neural_llm("eagle3", target)
    others = {"eagle2": "eagle", "hydra": "hydra", "medusa": "medusa"}
    factories = [llm._default, llm.factory("pld"), llm.factory("plain")]
    factories += [
        make_factory(drafter, {"head": head_folder(kind)}, target, codec=ByteTokenizer())
        for drafter, kind in others.items()
    ]
    low = saved_head(random_head("eagle3", CONFIG, taps=(5, 0, 0)))  # in a different order, and one of them twice
    factories.append(make_factory("griffin", {"head": low}, target, codec=ByteTokenizer()))
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    alone = [trees_of(llm, [factory], params)[0] for factory in factories]
    together = trees_of(llm, factories, params)
    assert together == alone
    assert len({tuple(tokens) for _, tokens in together}) == 1


def trees_of(llm: LLM, factories: Sequence[Any], params: SamplingParams) -> list[tuple[list[Any], list[int]]]:
    """For concurrent requests, one per factory: the tokens of all their trees, and their output."""
    engine = llm._engine
    found: dict[int, tuple[list[Any], list[int]]] = {
        engine.submit(GenerationRequest(prompt_ids=(1, 2, 3, 4, 5, 6), params=params, drafter=factory))[0]: ([], [])
        for factory in factories
    }
    for event in engine.events(list(found)):
        found[event.request_id][0].append(event.tree.tokens)
        found[event.request_id][1].extend(event.token_ids)
    return list(found.values())


class FailingDrafter(Eagle2Drafter):
    """Fails when the text of a request becomes long."""

    name = "failing"

    @classmethod
    def propose_batch(cls, drafters: Sequence[Any], budgets: Sequence[int]) -> list[DraftTree]:
        if max(drafter._length for drafter in drafters) > 12:
            raise RuntimeError("no more")
        return super().propose_batch(drafters, budgets)


def test_failing_drafter_ends_only_its_own_requests() -> None:
    place = {"head": head_folder("eagle")}
    llm = LLM.from_target(target_on(), ByteTokenizer(), drafter=FailingDrafter, drafter_options=place, budget=8)
    engine = llm._engine
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    failing = [
        engine.submit(GenerationRequest(prompt_ids=(1, 2, 3, number), params=params, drafter=llm._default))[0]
        for number in (4, 5)
    ]
    other = engine.submit(GenerationRequest(prompt_ids=(1, 2, 3, 4), params=params, drafter=llm.factory("pld")))[0]
    tokens = [token for event in engine.events([other]) for token in event.token_ids]
    assert tokens == llm.generate([[1, 2, 3, 4]], params, drafter="plain")[0].token_ids
    for request_id in failing:
        with pytest.raises(RuntimeError, match="no more"):
            list(engine.events([request_id]))
    assert not drafters_of(llm)
    assert is_empty(llm)
