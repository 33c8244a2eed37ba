"""The engine over time: streams, threads, cancellation, failures, chat, statistics, bad input."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.drafters import DraftRequest, PromptRows, VerifiedTree
from draftwood.drafters.pld import PromptLookupDrafter
from draftwood.engine import GenerationRequest
from draftwood.errors import CapabilityError, OptionError, PromptError, TreeError
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import ByteTokenizer
from draftwood.tree import DraftTree
from tests.conftest import logits_after
from tests.tools.engine import (
    PROMPTS,
    WildDrafter,
    llm,  # noqa: F401 - fixtures
    make_llm,
    reference,
)

# -- streams, cancellation, errors -----------------------------------------------------------------------------------


def test_stream_is_generate_piece_by_piece(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, logprobs=2)
    whole = llm.generate(PROMPTS[0], params, drafter="pld")[0]
    events = list(llm.stream(PROMPTS[0], params, drafter="pld"))
    assert [token for event in events for token in event.token_ids] == whole.token_ids
    assert "".join(event.text for event in events) == whole.text
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == whole.finish_reason


def test_long_prompts_and_predictions_are_admitted_one_per_cycle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafters read them between two passes, while running requests wait."""
    monkeypatch.setattr("draftwood.engine.scheduler.MAX_ADMITTED_TOKENS", 100)
    llm = make_llm(max_batch=8)
    engine = llm.engine
    for prediction, expected in (([1] * 200, [1, 2, 3]), ([1] * 45, [2, 4, 6]), ([], [6, 6, 6])):
        for _ in range(6):
            engine.submit(llm.request([1, 2, 3, 4, 5], SamplingParams(max_tokens=50), prediction=prediction))
        counts = []
        for _ in range(3):
            engine.step()
            counts.append(len(engine._scheduler.running))
        assert counts == expected
        engine.clear()


def test_closed_stream_frees_everything(llm: LLM) -> None:
    target = llm._engine.target
    for event in llm.stream("go on for long", SamplingParams(max_tokens=200), drafter="pld"):
        assert event.token_ids
        break
    assert not llm._engine.has_work
    assert target.can_open(target.num_slots)


def test_cancel_waiting_running_and_leading_requests() -> None:
    llm = make_llm(max_batch=2, prefill_chunk=4)
    engine, factory = llm._engine, llm.factory("plain")
    params = SamplingParams(max_tokens=10, n=3, temperature=1.0, seed=1)
    ids = engine.submit(GenerationRequest(prompt_ids=(1, 2, 3, 4, 5, 6, 7, 8, 9), params=params, drafter=factory))
    engine.step()
    engine.cancel(ids[0])  # the leader, in the middle of its prefill
    engine.cancel(999)
    done = [event.request_id for event in engine.events(ids[1:]) if event.finish_reason]
    assert sorted(done) == ids[1:]
    engine.clear()
    assert engine.target.can_open(4096)


def test_interleaved_streams_are_independent(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS[:3]]
    streams = [llm.stream(prompt, params, drafter="pld") for prompt in PROMPTS[:3]]
    seen: list[list[int]] = [[], [], []]
    seen[0] += next(streams[0]).token_ids
    assert llm.generate(PROMPTS[4], params)[0].token_ids == llm.generate(PROMPTS[4], params)[0].token_ids
    for index in (2, 1, 0):
        seen[index] += [token for event in streams[index] for token in event.token_ids]
    assert seen == expected
    assert not llm._engine.has_work


def test_unread_stream_costs_nothing(llm: LLM) -> None:
    llm.stream("never read")
    assert not llm._engine.has_work
    assert llm.generate("x", SamplingParams(max_tokens=3))[0].token_ids


def test_threads_may_share_a_model(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS]
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda prompt: llm.generate(prompt, params, drafter="pld")[0].token_ids, PROMPTS))
    assert results == expected


def test_failing_drafter_ends_only_its_own_request(llm: LLM) -> None:
    class Failing(WildDrafter):
        name = "failing"

        def observe(self, verified: VerifiedTree) -> None:
            raise RuntimeError("a mistake in a drafter")

    params = SamplingParams(max_tokens=10, ignore_eos=True)
    healthy = llm.stream(PROMPTS[0], params)
    first = next(healthy).token_ids
    with pytest.raises(RuntimeError, match="a mistake in a drafter"):
        llm.generate(PROMPTS[1], params, drafter=Failing)
    rest = [token for event in healthy for token in event.token_ids]
    assert [*first, *rest] == llm.generate(PROMPTS[0], params)[0].token_ids
    assert llm._engine.target.can_open(4096)


def test_drafter_failing_at_begin_ends_only_its_own_request(llm: LLM) -> None:
    class NeverReady(PromptLookupDrafter):
        def begin(self, request: DraftRequest) -> None:
            raise RuntimeError("a mistake in a drafter")

    params = SamplingParams(max_tokens=8, ignore_eos=True)
    good = llm.stream(PROMPTS[0], params)
    tokens = list(next(good).token_ids)
    bad = llm._engine.submit(GenerationRequest(prompt_ids=(1, 2, 3), params=params, drafter=llm.factory(NeverReady)))
    tokens += [token for event in good for token in event.token_ids]
    assert tokens == reference(llm, PROMPTS[0], 8)
    with pytest.raises(RuntimeError, match="a mistake"):
        list(llm._engine.events(bad))
    assert not llm._engine.has_work


def test_prompt_logits_do_not_disturb_other_requests() -> None:
    class Reader(PromptLookupDrafter):
        name = "reader"
        wants_prompt_logits = True
        read = 0

        def begin(self, request: DraftRequest) -> None:
            self.prompt_size = len(request.prompt_ids)
            super().begin(request)

        def read_prompt(self, rows: PromptRows) -> None:
            assert 0 <= rows.start < rows.start + len(rows.logits) < self.prompt_size
            Reader.read += len(rows.logits)

    llm = make_llm(drafter=Reader, prefill_chunk=8)
    prompts = ["a long prompt that takes many chunks to read, one after another", "short", "of medium length, this"]
    results = llm.generate(prompts, SamplingParams(max_tokens=20))
    assert [c.token_ids for c in results] == [reference(llm, prompt, 20) for prompt in prompts]
    assert Reader.read == sum(len(llm.tokenizer.encode(prompt)) - 1 for prompt in prompts)


def test_deleted_model_frees_its_cache() -> None:
    llm = make_llm()
    cache = weakref.ref(llm._engine.target.cache)
    llm.generate("x", SamplingParams(max_tokens=2))
    gc.disable()
    try:
        del llm
        assert cache() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("budget", [1, 40])
def test_the_whole_cache_can_be_filled_whatever_the_budget(budget: int) -> None:
    target = tiny_target(cache_tokens=64)
    llm = LLM.from_target(target, ByteTokenizer(), drafter="pld", budget=budget)
    got = llm.generate("abcabc", SamplingParams(max_tokens=500, ignore_eos=True))[0]
    assert len(got.token_ids) == 64 - 7
    assert got.finish_reason == "length"


def test_cache_held_by_others_raises_instead_of_waiting() -> None:
    target = tiny_target(cache_tokens=64)
    target.open(60)
    llm = LLM.from_target(target, ByteTokenizer(), budget=4)
    with pytest.raises(CapabilityError, match="no room for any waiting request"):
        llm.generate("hello", SamplingParams(max_tokens=20))


def test_logprobs_match_the_model(llm: LLM) -> None:
    got = llm.generate("logs", SamplingParams(max_tokens=8, temperature=0.7, seed=1, logprobs=3), drafter="pld")[0]
    tokens = llm.tokenizer.encode("logs")
    rows = logits_after(llm._engine.target, tokens + got.token_ids).log_softmax(-1)
    assert got.logprobs is not None
    for offset, entry in enumerate(got.logprobs):
        row = rows[len(tokens) - 1 + offset]
        assert entry.token_id == got.token_ids[offset]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [i for i, _ in entry.top] == row.topk(3).indices.tolist()


def test_several_conversations_in_one_call(llm: LLM) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("one", "two two", "three")]
    params = SamplingParams(max_tokens=9, n=2, temperature=1.0, seed=1)
    expected = [each for messages in conversations for each in llm.chat(messages, params)]
    found = llm.chat(conversations, params)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert [(each.prompt_index, each.index) for each in found] == [(i, j) for i in range(3) for j in range(2)]
    assert len(llm.chat(conversations[:1], params)) == 2
    for wrong in ([], [[]], [conversations[0], "two"], "one"):
        with pytest.raises(PromptError):
            llm.chat(wrong, params)  # type: ignore[arg-type]


def test_chat_reuses_the_cache_of_earlier_turns(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello there my friend"}]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first = llm.chat(messages, params)[0]
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "and then?"}]
    second = llm.chat(messages, params)[0]
    assert second.stats.reused_tokens >= len(llm.tokenizer.apply_chat(messages[:1])) - 1
    prompt = llm.tokenizer.apply_chat(messages)
    assert second.token_ids == llm.generate([prompt], params)[0].token_ids
    llm.close()
    assert llm._engine.target.can_open(4096)


def test_statistics_add_up(llm: LLM) -> None:
    got = llm.generate("abcabcabcabc", SamplingParams(max_tokens=50, ignore_eos=True), drafter="pld")[0]
    stats = got.stats
    assert stats.output_tokens == len(got.token_ids) == 50
    assert stats.acceptance_length == 50 / stats.cycles
    assert stats.cycles + sum(stats.accepted_by_source.values()) >= 50
    assert Counter(got.sources) == stats.accepted_by_source + Counter(target=got.sources.count("target"))
    assert stats.draft_seconds + stats.verify_seconds + stats.accept_seconds <= stats.total_seconds + 1e-3
    assert stats.as_dict()["seconds"]["total"] > 0


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ([1.5, 2], "must be text or token ids"),
        (b"abc", "must be text or token ids"),
        (None, "must be text or token ids"),
        ([1, "a"], "must be text or token ids"),
        ("", "empty"),
        ([], "empty"),
        ([300], "unknown token"),
        ([-1], "unknown token"),
        ("x" * 5000, "longer"),
    ],
)
def test_bad_prompts_are_refused(llm: LLM, prompt: str | list[int], why: str) -> None:
    with pytest.raises(PromptError, match=why):
        llm.generate([prompt])
    assert not llm._engine.has_work


def test_a_drafter_that_breaks_its_contract_is_named(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.setattr(WildDrafter, "propose", lambda self, budget: DraftTree.chain(range(budget + 1)))
    with pytest.raises(TreeError, match="'wild'"):
        llm.generate("x", drafter=WildDrafter)
    assert not llm._engine.has_work
    assert llm._engine.target.can_open(4096)


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_invalid_token_guess_ends_only_its_own_request(llm: LLM, token: int) -> None:
    """The target would read outside its embeddings, or fail the pass of other requests."""

    class Guessing(WildDrafter):
        name = "guessing"

        def propose(self, budget: int) -> DraftTree:
            return DraftTree.chain([self._last, token])

    params = SamplingParams(max_tokens=10, ignore_eos=True)
    healthy = llm.stream(PROMPTS[0], params)
    first = next(healthy).token_ids
    with pytest.raises(TreeError, match="'guessing'"):
        llm.generate(PROMPTS[1], params, drafter=Guessing)
    rest = [token for event in healthy for token in event.token_ids]
    assert [*first, *rest] == llm.generate(PROMPTS[0], params)[0].token_ids


def test_token_ids_may_come_from_numpy_and_torch(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    expected = llm.generate([65, 66, 67], params)[0].token_ids
    for ids in (np.array([65, 66, 67]), torch.tensor([65, 66, 67]), (65, 66, 67), [np.int64(65), 66, 67]):
        assert llm.generate(ids, params)[0].token_ids == expected


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}])
def test_rejects_invalid_prompt_types(llm: LLM, prompts: object) -> None:
    with pytest.raises(PromptError, match="must be text or token ids"):
        llm.generate(prompts)
    with pytest.raises(OptionError, match="SamplingParams"):
        llm.generate("x", {"max_tokens": 3})


def test_stream_refuses_several_samples(llm: LLM) -> None:
    with pytest.raises(OptionError, match="one sample"):
        llm.stream("x", SamplingParams(n=2))


def test_auto_budget_is_measured() -> None:
    llm = make_llm(budget="auto")
    assert 2 <= llm.budget <= 64
    assert llm._engine.target.can_open(4096)
