"""The engine end to end on the tiny model: exactness, batching, stopping, cancellation, statistics."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftwood import LLM, SamplingParams
from draftwood.drafters import Drafter, DraftRequest, Verified, drafter_names
from draftwood.drafters.pld import PromptLookupDrafter
from draftwood.errors import CapabilityError, OptionError, PromptError, TreeError
from draftwood.target.tiny import ByteTokenizer, tiny_target
from draftwood.tree import DraftTree, Proposal, TreeBuilder

from .conftest import logits_after

PROMPTS = [
    "hello hello hello",
    "a",
    "the cat sat on the mat, the cat sat",
    "xyz" * 20,
    "one two three one two",
    "q" * 9,
]


class WildDrafter(Drafter):
    """Random trees from a small vocabulary: chosen, drawn or mixed children at every node."""

    name = "wild"

    def begin(self, request: DraftRequest) -> None:
        self._last = request.prompt_ids[-1]
        self._rng = request.rng
        self._draws = not request.params.is_greedy

    def propose(self, budget: int) -> DraftTree:
        builder = TreeBuilder(self._last)
        proposals, num_chosen = {}, {}
        node = 0
        while node < len(builder) and len(builder) + 4 <= budget:
            chosen = self._rng.choice(256, size=int(self._rng.integers(0, 3)), replace=False)
            for token in chosen:
                builder.add(node, int(token), "chosen")
            if self._draws and self._rng.random() < 0.7:
                rest = np.setdiff1d(np.arange(256), chosen)
                q = self._rng.dirichlet(np.full(len(rest), 0.1))
                ids, q = rest[q > 1e-9], q[q > 1e-9] / q[q > 1e-9].sum()
                for token in self._rng.choice(ids, size=min(2, len(ids)), replace=False, p=q):
                    builder.add(node, int(token), "drawn")
                proposals[node], num_chosen[node] = Proposal(ids, q), len(chosen)
            node += 1
        return builder.build(proposals, num_chosen)

    def observe(self, verified: Verified) -> None:
        self._last = verified.emitted[-1]


class OracleDrafter(Drafter):
    """Knows the plain output and drafts exactly that, beside decoys."""

    name = "oracle"
    outputs: dict[tuple[int, ...], list[int]] = {}  # noqa: RUF012 - filled by the tests

    def begin(self, request: DraftRequest) -> None:
        self._last = request.prompt_ids[-1]
        self._ahead = list(self.outputs[tuple(request.prompt_ids)])

    def propose(self, budget: int) -> DraftTree:
        builder = TreeBuilder(self._last)
        node = 0
        for token in self._ahead[: (budget - 1) // 2]:
            builder.add(node, (token + 1) % 256, "decoy")
            node = builder.add(node, token, "oracle")
        return builder.build()

    def observe(self, verified: Verified) -> None:
        self._ahead = self._ahead[len(verified.emitted) :]
        self._last = verified.emitted[-1]


@pytest.fixture(scope="module", params=["eager", "auto"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with make_llm(request.param) as llm:
        yield llm


def make_llm(backend: str = "auto", **options: object) -> LLM:
    target = tiny_target(backend=backend, cache_tokens=4096)
    return LLM.from_target(target, ByteTokenizer(), **{"drafter": "plain", "budget": 12, **options})


def reference(llm: LLM, prompt: str, max_tokens: int) -> list[int]:
    """Greedy decoding by hand, a whole new pass for every token."""
    tokens = llm.tokenizer.encode(prompt)
    output: list[int] = []
    while len(output) < max_tokens and 257 not in output:
        output.append(int(logits_after(llm._engine.target, tokens + output)[-1].argmax()))
    return output


# -- exactness -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["plain", "pld", WildDrafter])
def test_greedy_output_is_plain_decoding(llm: LLM, drafter: str | type[Drafter]) -> None:
    params = SamplingParams(max_tokens=40)
    for prompt, completion in zip(PROMPTS, llm.generate(PROMPTS, params, drafter=drafter), strict=True):
        assert completion.token_ids == reference(llm, prompt, 40)


def test_every_registered_drafter_is_tested_for_exactness() -> None:
    # A new drafter must be added to the tests above and below.
    assert drafter_names() == ["plain", "pld"]


@pytest.mark.parametrize("drafter", ["plain", "pld", WildDrafter])
def test_batch_equals_one_by_one(llm: LLM, drafter: str | type[Drafter]) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=5)
    together = llm.generate(PROMPTS, params, drafter=drafter)
    alone = [llm.generate(prompt, params, drafter=drafter)[0] for prompt in PROMPTS]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert [c.prompt_index for c in together] == list(range(len(PROMPTS)))


@pytest.mark.parametrize("temperature", [0.4, 1.0])
def test_a_seed_gives_the_same_output_with_every_drafter_that_chooses(llm: LLM, temperature: float) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, top_p=0.95, seed=11)
    plain = llm.generate(PROMPTS, params, drafter="plain")
    lookup = llm.generate(PROMPTS, params, drafter="pld")
    assert [c.token_ids for c in plain] == [c.token_ids for c in lookup]


def test_penalties_follow_the_path_inside_a_tree(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=40, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, logprobs=1
    )
    plain = llm.generate(PROMPTS, params, drafter="plain")
    OracleDrafter.outputs = {
        tuple(llm.tokenizer.encode(prompt)): c.token_ids for prompt, c in zip(PROMPTS, plain, strict=True)
    }
    oracle = llm.generate(PROMPTS, params, drafter=OracleDrafter)
    assert [c.token_ids for c in plain] == [c.token_ids for c in oracle]
    assert all(c.stats.acceptance_length > 4 for c in oracle)
    assert len(set(plain[0].token_ids)) > 20  # the penalties did something


def test_oracle_accepts_everything(llm: LLM) -> None:
    params = SamplingParams(max_tokens=36, ignore_eos=True)
    plain = llm.generate(PROMPTS[0], params, drafter="plain")[0]
    OracleDrafter.outputs = {tuple(llm.tokenizer.encode(PROMPTS[0])): plain.token_ids}
    oracle = llm.generate(PROMPTS[0], params, drafter=OracleDrafter)[0]
    assert oracle.token_ids == plain.token_ids
    assert oracle.stats.cycles == 6  # five guesses and the bonus token a cycle
    assert oracle.stats.acceptance_by_depth() == [1.0] * 5
    assert oracle.sources[:6] == ["oracle"] * 5 + ["target"]
    assert oracle.stats.accepted_by_source == Counter(oracle=30)


@pytest.mark.parametrize("drafter", ["plain", WildDrafter])
def test_sampled_tokens_have_the_target_distribution(drafter: str | type[Drafter]) -> None:
    """Chi-square of the first two tokens over many seeds against the model's own probabilities."""
    llm = make_llm(drafter=drafter, max_batch=64)
    prompt = llm.tokenizer.encode("to")
    target = llm._engine.target
    warm, keep = 1.5, 6

    def probabilities(tokens: Sequence[int]) -> torch.Tensor:
        scores = logits_after(target, tokens)[-1] / warm
        kept = scores >= scores.topk(keep).values[-1]
        return torch.where(kept, scores, -torch.inf).softmax(-1).double()

    first = probabilities(prompt)
    expected = {}
    for a in first.nonzero().flatten().tolist():
        second = probabilities([*prompt, a])
        for b in second.nonzero().flatten().tolist():
            expected[a, b] = float(first[a] * second[b])
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
    plain = llm.generate(prompt, params, drafter="plain")[0].token_ids
    OracleDrafter.outputs = {tuple(llm.tokenizer.encode(prompt)): plain}
    return llm, plain


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


def test_stop_string_cuts_inside_a_block_and_streams_nothing_of_it() -> None:
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


# -- streams, cancellation, errors -----------------------------------------------------------------------------------


def test_stream_is_generate_piece_by_piece(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, logprobs=2)
    whole = llm.generate(PROMPTS[0], params, drafter="pld")[0]
    events = list(llm.stream(PROMPTS[0], params, drafter="pld"))
    assert [token for event in events for token in event.token_ids] == whole.token_ids
    assert "".join(event.text for event in events) == whole.text
    assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1].finish_reason == whole.finish_reason


def test_leaving_a_stream_frees_everything(llm: LLM) -> None:
    target = llm._engine.target
    for event in llm.stream("go on for long", SamplingParams(max_tokens=200), drafter="pld"):
        assert event.token_ids
        break
    assert not llm._engine.has_work
    assert target.can_open(target.num_slots)


def test_cancel_waiting_running_and_leading_requests() -> None:
    llm = make_llm(max_batch=2, prefill_chunk=4)
    engine, factory = llm._engine, llm._factory("plain")
    params = SamplingParams(max_tokens=10, n=3, temperature=1.0, seed=1)
    ids = engine.submit([1, 2, 3, 4, 5, 6, 7, 8, 9], params, factory)
    engine.step()
    engine.cancel(ids[0])  # the leader, in the middle of its prefill
    engine.cancel(999)
    done = [event.request_id for event in engine.events(ids[1:]) if event.finish_reason]
    assert sorted(done) == ids[1:]
    engine.clear()
    assert engine.target.can_open(4096)


def test_streams_that_are_read_in_turns_keep_apart(llm: LLM) -> None:
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


def test_a_stream_that_nobody_reads_costs_nothing(llm: LLM) -> None:
    llm.stream("never read")
    assert not llm._engine.has_work
    assert llm.generate("x", SamplingParams(max_tokens=3))[0].token_ids


def test_threads_may_share_a_model(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS]
    with ThreadPoolExecutor(6) as threads:
        results = list(threads.map(lambda prompt: llm.generate(prompt, params, drafter="pld")[0].token_ids, PROMPTS))
    assert results == expected


def test_a_failing_drafter_ends_its_own_request_only(llm: LLM) -> None:
    class Failing(WildDrafter):
        name = "failing"

        def observe(self, verified: Verified) -> None:
            raise RuntimeError("a mistake in a drafter")

    params = SamplingParams(max_tokens=10, ignore_eos=True)
    healthy = llm.stream(PROMPTS[0], params)
    first = next(healthy).token_ids
    with pytest.raises(RuntimeError, match="a mistake in a drafter"):
        llm.generate(PROMPTS[1], params, drafter=Failing)
    rest = [token for event in healthy for token in event.token_ids]
    assert [*first, *rest] == llm.generate(PROMPTS[0], params)[0].token_ids
    assert llm._engine.target.can_open(4096)


def test_prompts_that_are_read_do_not_disturb_their_neighbours() -> None:
    class Reader(PromptLookupDrafter):
        name = "reader"
        wants_prompt_logits = True
        read = 0

        def read_prompt(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
            assert logits.shape[0] == len(token_ids)
            Reader.read += len(token_ids)

    llm = make_llm(drafter=Reader, prefill_chunk=8)
    prompts = ["a long prompt that takes many chunks to read, one after another", "short", "of medium length, this"]
    results = llm.generate(prompts, SamplingParams(max_tokens=20))
    assert [c.token_ids for c in results] == [reference(llm, prompt, 20) for prompt in prompts]
    assert Reader.read == sum(len(llm.tokenizer.encode(prompt)) - 1 for prompt in prompts)


def test_a_model_that_is_let_go_frees_its_cache() -> None:
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


def test_a_cache_that_others_hold_is_an_error_not_an_endless_wait() -> None:
    target = tiny_target(cache_tokens=64)
    target.open(60)
    llm = LLM.from_target(target, ByteTokenizer(), budget=4)
    with pytest.raises(CapabilityError, match="no room for any waiting request"):
        llm.generate("hello", SamplingParams(max_tokens=20))


def test_logprobs_are_the_model_s_own(llm: LLM) -> None:
    got = llm.generate("logs", SamplingParams(max_tokens=8, temperature=0.7, seed=1, logprobs=3), drafter="pld")[0]
    tokens = llm.tokenizer.encode("logs")
    rows = logits_after(llm._engine.target, tokens + got.token_ids).log_softmax(-1)
    assert got.logprobs is not None
    for offset, entry in enumerate(got.logprobs):
        row = rows[len(tokens) - 1 + offset]
        assert entry.token_id == got.token_ids[offset]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert [i for i, _ in entry.top] == row.topk(3).indices.tolist()


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
        ([1.5, 2], "no prompt"),
        (b"abc", "no prompt"),
        (None, "no prompt"),
        ([1, "a"], "no prompt"),
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


def test_token_ids_may_come_from_numpy_and_torch(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    expected = llm.generate([65, 66, 67], params)[0].token_ids
    for ids in (np.array([65, 66, 67]), torch.tensor([65, 66, 67]), (65, 66, 67), [np.int64(65), 66, 67]):
        assert llm.generate(ids, params)[0].token_ids == expected


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}])
def test_what_is_no_prompt_at_all_is_refused(llm: LLM, prompts: object) -> None:
    with pytest.raises(PromptError, match="no prompt"):
        llm.generate(prompts)
    with pytest.raises(OptionError, match="SamplingParams"):
        llm.generate("x", {"max_tokens": 3})


def test_streams_carry_one_sample(llm: LLM) -> None:
    with pytest.raises(OptionError, match="one sample"):
        llm.stream("x", SamplingParams(n=2))


def test_auto_budget_is_measured() -> None:
    llm = make_llm(budget="auto")
    assert 2 <= llm.budget <= 60
    assert llm._engine.target.can_open(4096)
