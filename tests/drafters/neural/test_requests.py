"""Requests of all kinds with neural drafters: long prompts, stops, samples, penalties, conversations."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch

from draftwood import SamplingParams
from draftwood.drafters import make_factory, neural
from draftwood.drafters.neural import NeuralDrafter
from draftwood.engine import GenerationRequest, drafting
from draftwood.engine.session import Session
from draftwood.engine.ways import Ways
from draftwood.growth.neural import Times
from draftwood.sizing import Experience, Sizer
from draftwood.sources.neural import DraftSegment
from draftwood.targets import ForwardOutput, Segment, TopRows
from draftwood.targets.native.target import NativeTarget
from draftwood.text.bytes import ByteTokenizer
from tests.tools.neural import (
    KINDS,
    _one_thread,  # noqa: F401 - fixtures
    clock_text,
    draft_model,
    following,
    is_empty,
    neural_llm,
    perfect_llm,
    random_target,
    same_as_plain,
)

Forward = Callable[[Sequence[Segment]], ForwardOutput]
PROMPTS = [[7], "hello hello hello", [7, 8]]


@cache
def target_on(backend: str = "auto") -> NativeTarget:
    return random_target(backend=backend)


@pytest.mark.parametrize("chunk", [100, 1000])
@pytest.mark.parametrize("drafter", KINDS)
def test_long_prompts(drafter: str, chunk: int) -> None:
    """The text takes more than one draft pass."""
    llm = neural_llm(drafter, target_on(), prefill_chunk=chunk)
    prompts = [[i % 250 for i in range(size)] for size in (513, 700)]
    same_as_plain(llm, prompts, SamplingParams(max_tokens=4))


@pytest.mark.parametrize("drafter", ["eagle2", "eagle3", "medusa", "sps"])
def test_stops_inside_blocks(drafter: str) -> None:
    """A drafter that is always right makes blocks long."""
    llm = perfect_llm(drafter, growth="chain")
    text = clock_text(following(9), 30)
    for place in range(1, 12):
        params = SamplingParams(max_tokens=30, stop=[ByteTokenizer().decode(text[place : place + 2])])
        same_as_plain(llm, [clock_text(9, 1), clock_text(3, 4)], params)
        by_token = SamplingParams(max_tokens=30, stop_token_ids=(text[place],))
        assert same_as_plain(llm, [[*clock_text(2, 4), 9]], by_token)[0].token_ids == text[: place + 1]


@pytest.mark.parametrize("drafter", ["eagle2", "eagle3", "hydra", "sps"])
def test_samples_of_one_prompt(drafter: str) -> None:
    """Chosen children: the same seed gives the same text as plain decoding."""
    llm = neural_llm(drafter, target_on(), max_batch=2)
    params = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9, seed=3, n=5)
    results = same_as_plain(llm, PROMPTS[:2], params)
    assert len({tuple(c.token_ids) for c in results}) > 5


@pytest.mark.parametrize("drafter", KINDS)
def test_draft_model_does_not_run_without_drafting(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = neural_llm(drafter, target_on(), budget=1)
    monkeypatch.setattr(draft_model(llm), "forward", None)  # a call fails
    params = SamplingParams(max_tokens=4, temperature=0.8, seed=3, n=2)
    results = same_as_plain(llm, PROMPTS[:2], params)
    assert results[-1].stats.reused_tokens > 0  # samples share their prompt


@pytest.mark.parametrize("drafter", ["eagle3", "sps"])
def test_trees_grow_from_little_text(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a pause: what was missed is read before, since graphs of other sizes would have to be captured."""
    llm = neural_llm(drafter, target_on(), budget="auto")
    model, asked, sizes = draft_model(llm), itertools.count(), list[int]()
    forward = model.forward

    def noted(segments: Sequence[DraftSegment], k: int) -> TopRows:
        sizes.extend(len(each.segment.token_ids) for each in segments if each.segment.num_logits)
        return forward(segments, k)

    monkeypatch.setattr(model, "forward", noted)
    monkeypatch.setattr(model, "root_chunk", 16)
    monkeypatch.setattr(Sizer, "is_pausing", property(lambda _: next(asked) % 50 < 46))
    same_as_plain(llm, ["hello hello hello"], SamplingParams(max_tokens=120, ignore_eos=True))
    assert sizes
    assert max(sizes) <= 16


@pytest.mark.parametrize("drafter", ["eagle3", "sps"])
def test_the_time_of_prepared_passes_counts_nowhere(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here every pass of the draft model is prepared for the first time: nothing is known about what drafts take."""
    llm = neural_llm(drafter, target_on(), budget="auto", max_batch=4)
    model, counts, noted, rests = draft_model(llm), itertools.count(), list[float](), list[None]()
    monkeypatch.setattr(type(model), "num_prepared", property(lambda _: next(counts)))
    monkeypatch.setattr(Experience, "note_draft", lambda _, *seconds: noted.extend(seconds))
    monkeypatch.setattr(Times, "note_draft", lambda _, levels, seconds: noted.append(seconds))
    monkeypatch.setattr(Ways, "rest", lambda _: rests.append(None))
    same_as_plain(llm, PROMPTS, SamplingParams(max_tokens=24, ignore_eos=True))
    assert not noted
    assert len(rests) > 5


@pytest.mark.parametrize(("size", "num_heads"), [(2, 2), (8, 8), (8, 1)])
def test_heads_of_a_batch_that_tries_without_drafts_do_not_pause(
    size: int, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would run for the others all the same, if there are others."""
    wanted, draft_group = list[int](), drafting._draft_group

    def noted(sessions: Sequence[Session]) -> None:
        wanted.extend(session.num_wanted for session in sessions if session.num_left > 1)
        draft_group(sessions)

    monkeypatch.setattr(drafting, "_draft_group", noted)
    monkeypatch.setattr(Sizer, "wanted", property(lambda _: 1))  # all of them would pause
    llm = neural_llm("eagle3", target_on(), budget="auto", max_batch=size)
    factories = [llm._default] * num_heads + [make_factory("goose", {}, llm.engine.target)] * (size - num_heads)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [
        llm.engine.submit(GenerationRequest(prompt_ids=(7 + place,), params=params, drafter=factory))[0]
        for place, factory in enumerate(factories)
    ]
    list(llm.engine.events(requests))
    assert (max(wanted) > 1) == (num_heads == 8)


@pytest.mark.parametrize("drafter", ["eagle2", "eagle3", "hydra", "sps"])
def test_penalties_and_logprobs(drafter: str) -> None:
    llm = neural_llm(drafter, target_on())
    params = SamplingParams(max_tokens=12, repetition_penalty=1.4, presence_penalty=0.5, logprobs=2)
    same_as_plain(llm, PROMPTS, params)


@pytest.mark.parametrize("drafter", ["eagle2", "eagle3", "sps"])
def test_continued_conversation(drafter: str) -> None:
    llm = neural_llm(drafter, target_on())
    params = SamplingParams(max_tokens=12)
    messages = [{"role": "user", "content": "say something long, please"}]
    for turn in range(3):
        answer, plain = (llm.chat(messages, params, drafter=each)[0] for each in (None, "plain"))
        assert answer.token_ids == plain.token_ids
        messages += [{"role": "assistant", "content": "so be it"}, {"role": "user", "content": f"and {turn}?"}]
    assert is_empty(llm)


@pytest.mark.parametrize("drafter", ["eagle2", "eagle3", "medusa"])
def test_hidden_states_outlast_the_pass_that_overwrites_them(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target may use the memory of hidden states again. In every other cycle nothing is drafted, so that they are
    read later."""
    target = random_target()
    target.info = replace(target.info, keeps_taps=False)
    trees = []
    for overwrites in (False, True):
        counts, last = itertools.cycle([1, 8, 1, 1, 8]), list[torch.Tensor]()

        def count_wanted(session: Session, sizes: Iterator[int] = counts, **_: bool) -> int:
            return min(next(sizes), session.num_left)

        def forward(
            segments: Sequence[Segment], run: Forward = target.forward, old: list[torch.Tensor] = last
        ) -> ForwardOutput:
            while old:
                old.pop().fill_(torch.nan)
            output = run(segments)
            if output.taps is not None:
                old.append(output.taps)
            return output

        llm = neural_llm(drafter, target)
        with monkeypatch.context() as patch:
            patch.setattr(drafting, "_count_wanted", count_wanted)
            if overwrites:
                patch.setattr(target, "forward", forward)
            trees.append([event.tree for event in llm.stream("hello hello", SamplingParams(max_tokens=12))])
    assert trees[0] == trees[1]
    assert max(map(len, trees[0])) > 1


def test_hidden_states_of_a_target_that_keeps_them_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying the few rows of a path takes 1% of a short pass. Those of a large pass are copied: a request would keep
    the memory of all."""
    monkeypatch.setattr(drafting, "_count_wanted", lambda *_, **__: 1)  # nothing is drafted, so they are kept
    found, copy = list[bool](), NeuralDrafter._copy_features

    def watch(drafter: NeuralDrafter) -> None:
        had_rows = drafter._is_borrowing and bool(drafter._features)
        copy(drafter)
        if had_rows:
            found.append(drafter._features[-1][1] is None)

    monkeypatch.setattr(NeuralDrafter, "_copy_features", watch)
    for keeps, limit in ((True, 1 << 20), (True, 100), (False, 1 << 20)):
        monkeypatch.setattr(neural, "MAX_SHARED_BYTES", limit)
        target = random_target()
        assert target.info.keeps_taps
        target.info = replace(target.info, keeps_taps=keeps)
        found.clear()
        neural_llm("eagle3", target).generate(["hello hello"], SamplingParams(max_tokens=12))
        assert len(found) > 5
        assert set(found) == {not keeps or limit == 100}
