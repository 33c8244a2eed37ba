"""The drafter `blend`: exact with every set of sources, and better with more of them."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.drafters import DraftRequest, VerifiedTree, blend_head, make_factory
from draftwood.drafters.blend import SOURCES
from draftwood.drafters.blend_options import NAMES, TABLES
from draftwood.engine import GenerationRequest
from draftwood.errors import CapabilityError, OptionError
from draftwood.growth import SearchRecord
from draftwood.sources import build_datastore
from draftwood.sources.neural import DraftModel
from draftwood.targets import TopRows
from draftwood.targets.native.target import NativeTarget
from draftwood.text.bytes import ByteTokenizer
from draftwood.tree import DraftTree
from tests.tools.enumeration import Branching, Law, decide_in_engine, difference, outcomes
from tests.tools.head import random_head
from tests.tools.neural import (
    FEW,
    PROMPT,
    _one_thread,  # noqa: F401 - a fixture
    clock_target,
    clock_text,
    draft_models,
    head_folder,
    law_of,
    perfect_head,
    random_target,
    saved_head,
    tau,
)

PROMPTS = [[7], "hello hello hello", [7, 8], "the cat sat on the mat, the cat sat"]
ALL = f"{TABLES}+datastore+head"


@cache
def target_on() -> NativeTarget:
    return random_target()


@cache
def datastore(vocab_size: int) -> str:
    """A file with a few texts, some of them in the prompts."""
    texts = ["hello hello world", "the cat sat on the mat, and the cat sat on the mat again"]
    documents = [*map(ByteTokenizer().encode, texts), clock_text(3, 40)]
    own = [[token % vocab_size for token in document] for document in documents]
    path = Path(mkdtemp(prefix="datastore-")) / "texts.datastore"
    build_datastore(own, vocab_size=vocab_size, tokenizer="bytes").save(path)
    return str(path)


def blend_llm(sources: str = ALL, target: NativeTarget | None = None, **options: Any) -> LLM:
    own: dict[str, Any] = {"sources": sources, "top_k": options.pop("top_k", 10)}
    options = {"budget": 12, "max_batch": 3, "head": head_folder("eagle3"), **options}
    head = options.pop("head")
    own |= {"head": head} if "head" in sources.split("+") else {}
    target = target or target_on()
    own |= {"datastore": datastore(target.info.vocab_size)} if "datastore" in sources.split("+") else {}
    own |= {"model": "draft"} if "model" in sources.split("+") else {}
    with draft_models(options.pop("model", lambda **kwargs: random_target(noise=0.02, **kwargs))):
        return LLM.from_target(target, ByteTokenizer(), drafter="blend", drafter_options=own, **options)


@pytest.mark.parametrize("budget", [1, 2, 12, 60, "auto"])
@pytest.mark.parametrize("sources", [*SOURCES, TABLES, ALL, f"{TABLES}+model"])
def test_greedy_output_is_plain_decoding(sources: str, budget: int | str) -> None:
    llm = blend_llm(sources, budget=budget)
    params = SamplingParams(max_tokens=12)
    results, plain = (llm.generate(PROMPTS, params, drafter=drafter) for drafter in (None, "plain"))
    assert [c.token_ids for c in results] == [c.token_ids for c in plain]


@pytest.mark.parametrize("budget", [2, 12, "auto"])
@pytest.mark.parametrize("source", ["head", "model"])
def test_greedy_output_with_whole_searches(source: str, budget: int | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, except that the draft model runs each search pass by pass."""
    monkeypatch.setattr(DraftModel, "searches", True)
    llm = blend_llm(f"{TABLES}+{source}", budget=budget)
    params = SamplingParams(max_tokens=40)
    results, plain = (llm.generate(PROMPTS, params, drafter=drafter) for drafter in (None, "plain"))
    assert [c.token_ids for c in results] == [c.token_ids for c in plain]
    assert isinstance(llm._default._shared.states[0.0].drafts.searches, SearchRecord)


def test_searches_are_recorded_by_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of two temperatures draft together; each teaches its own."""
    monkeypatch.setattr(DraftModel, "searches", True)
    llm = blend_llm(f"{TABLES}+head", budget="auto")
    params = [SamplingParams(max_tokens=24, temperature=temperature, seed=1) for temperature in (0.0, 0.8)]
    ids = []
    for each in params:
        request = GenerationRequest(prompt_ids=(7, 8, 9, 7, 8), params=each, drafter=llm._default)
        ids += llm.engine.submit(request)
    list(llm.engine.events(ids))
    states = llm._default._shared.states
    first = SearchRecord().gains(1.0)
    for temperature in (0.0, 0.8):
        record = states[temperature].drafts.searches
        assert any(record.gains(promise) != first for promise in (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 8.0))


@pytest.mark.parametrize("searches", [False, True])
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "medusa", "hydra"])
def test_every_kind_of_head(kind: str, searches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A perfect head alone: the trees are as deep as it can see."""
    monkeypatch.setattr(DraftModel, "searches", searches)
    llm = blend_llm("head", clock_target(), head=saved_head(perfect_head(kind)))
    result = llm.generate([clock_text(3, 5)], SamplingParams(max_tokens=24))
    assert result[0].token_ids == clock_text(3, 29)[5:]
    assert tau(result) > 3


@pytest.mark.parametrize("searches", [False, True])
def test_a_small_model_drafts_too(searches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftModel, "searches", searches)
    llm = blend_llm("model", clock_target(), model=clock_target)
    result = llm.generate([clock_text(3, 5)], SamplingParams(max_tokens=24))
    assert result[0].token_ids == clock_text(3, 29)[5:]
    assert tau(result) > 3
    assert set(result[0].stats.accepted_by_source) == {"model"}


def test_a_datastore_knows_what_the_text_does_not() -> None:
    params = SamplingParams(max_tokens=24)
    without, with_store = (
        LLM.from_target(clock_target(), ByteTokenizer(), drafter="blend", drafter_options=options, budget=12)
        for options in ({"sources": TABLES}, {"datastore": datastore(clock_target().info.vocab_size)})
    )
    results = [llm.generate([clock_text(3, 5)], params) for llm in (without, with_store)]
    assert results[0][0].token_ids == results[1][0].token_ids
    assert tau(results[1]) > 1.5 * tau(results[0])
    assert results[1][0].stats.accepted_by_source["datastore"]


def test_a_head_helps_where_nothing_was_seen_before() -> None:
    llms = [blend_llm(sources, clock_target(), head=saved_head(perfect_head("eagle3"))) for sources in (TABLES, ALL)]
    without, with_head = (tau(llm.generate([clock_text(3, 5)], SamplingParams(max_tokens=16))) for llm in llms)
    assert with_head > 1.5 * without


@pytest.mark.parametrize("searches", [False, True])
@pytest.mark.parametrize("sources", [TABLES, ALL, f"{TABLES}+model"])
def test_distribution_of_samples(sources: str, searches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all random outcomes, four tokens have the target's distribution."""
    monkeypatch.setattr(DraftModel, "searches", searches)
    head = saved_head(random_head("eagle", FEW))
    llm = blend_llm(
        sources,
        random_target(FEW),
        budget=5,
        top_k=3,
        head=head,
        model=lambda **kwargs: random_target(FEW, noise=0.02, **kwargs),
    )
    params = SamplingParams(temperature=0.8, max_tokens=4)
    law: Law = defaultdict(float)
    longest = 0

    def experiment(chance: Branching) -> tuple[int, ...]:
        nonlocal longest
        decide_in_engine(chance, monkeypatch)
        events = list(llm.stream(PROMPT, params))
        longest = max(longest, *(len(event.token_ids) for event in events))
        return tuple(token for event in events for token in event.token_ids)

    for output, weight in outcomes(experiment):
        law[output] += weight
    assert difference(law, law_of(llm, params, 4)) < 1e-5
    assert longest > 1


def test_seeds_give_the_text_of_plain_decoding() -> None:
    llm = blend_llm(ALL)
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5, n=3)
    results, plain = (llm.generate(PROMPTS, params, drafter=drafter) for drafter in (None, "plain"))
    assert [c.token_ids for c in results] == [c.token_ids for c in plain]


def test_predictions_for_positions_move_with_skipped_tokens() -> None:
    """A rejected branch predicted 11, 12 and 13 for the next positions; two of them pass without this drafter."""
    factory = make_factory("blend", {"sources": "position", "top_k": 1}, target_on().info)
    told, skipping = (factory.new(number) for number in range(2))
    tree = DraftTree((7, 8, 9, 10), (-1, 0, 1, 2), (0, 1, 2, 3), ("root", *["position"] * 3), (1.0, *[0.5] * 3))
    row = TopRows(np.array([[10], [11], [12], [13]], np.int32), np.zeros((4, 1), np.float32), np.zeros(4, np.float32))
    for drafter in (told, skipping):
        drafter.begin(DraftRequest([7], SamplingParams(), np.random.default_rng(0)))
        drafter.observe(VerifiedTree(tree, torch.empty(0), [], [0], [1], None, row))
    for token in (2, 3):
        root, rows = DraftTree.root_only(token - 1), row.at([0])
        told.observe(VerifiedTree(root, torch.empty(0), [], [0], [token], None, rows))
    skipping.skip([2, 3])
    assert told.propose(4).tokens == skipping.propose(4).tokens == (3, 13)


def test_sources_are_checked() -> None:
    for wrong in ("", "context+", "context+context", "contxt"):
        with pytest.raises(OptionError, match="sources"):
            make_factory("blend", {"sources": wrong}, target_on().info)
    for both in ({"sources": "head+model", "model": "a"}, {"head": "a", "model": "a"}):
        with pytest.raises(OptionError, match="a head or a small model"):
            make_factory("blend", both, target_on().info)
    with pytest.raises(OptionError, match="needs a small model"):
        make_factory("blend", {"sources": "model"}, target_on().info)
    for unused in ("datastore", "model", "head"):
        with pytest.raises(OptionError, match=f"'{unused}' needs the source"):
            make_factory("blend", {"sources": "context", unused: "a"}, target_on().info)
    with pytest.raises(OptionError, match="'datastore' needs a file"):
        make_factory("blend", {"sources": "context+datastore"}, target_on().info)
    with pytest.raises(CapabilityError, match="needs the target model"):
        make_factory("blend", {"sources": "head", "head": head_folder("eagle3")}, target_on().info)


def test_a_head_goes_on_after_cycles_without_it() -> None:
    """Its drafts are as good as before once it has read some text again."""
    llm = blend_llm("head", clock_target(), head=saved_head(perfect_head("eagle3")), max_batch=1, budget=4)
    params = SamplingParams(max_tokens=40)
    expected = llm.generate([clock_text(3, 5)], params, drafter="plain")[0].token_ids
    request = llm.request(clock_text(3, 5), params)
    (number,) = llm.engine.submit(request)
    tokens: list[int] = []
    sizes: list[int] = []
    while len(tokens) < 40:
        session = llm.engine._scheduler.find(number)
        if session is not None and 4 <= len(sizes) < 6:
            session.drafts = False  # rests
        elif session is not None:
            session.drafts = True
        llm.engine.step()
        for _, event in llm.engine.take_ready([number]):
            assert not isinstance(event, Exception)
            tokens += event.token_ids
            sizes.append(len(event.token_ids))
    assert tokens == expected
    assert sizes[4:6] == [1, 1]
    assert max(sizes[7:]) >= max(sizes[:4]) > 1


def test_a_head_need_not_see_the_whole_prompt() -> None:
    llm = blend_llm("head", clock_target(), head=saved_head(perfect_head("eagle3")), max_batch=1)
    text, params = clock_text(3, 30), SamplingParams(max_tokens=16)
    first, second = (list(llm.stream(text, params, reuse=True)) for _ in range(2))
    texts = [[token for event in events for token in event.token_ids] for events in (first, second)]
    assert texts[0] == texts[1]
    assert second[-1].stats.reused_tokens > 20
    assert second[-1].stats.cycles <= first[-1].stats.cycles + 1


def test_a_head_reads_the_end_of_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = blend_llm("head", clock_target(), head=saved_head(perfect_head("eagle3")), max_batch=1)
    text, params = clock_text(3, 30), SamplingParams(max_tokens=16)
    whole = llm.generate([text], params)[0]
    model, num_read = llm._default._shared.head.model, list[int]()
    forward = model.forward

    def counting(segments: Any, k: int) -> Any:
        num_read.extend(len(each.segment.token_ids) for each in segments if each.features is not None)
        return forward(segments, k)

    monkeypatch.setattr(model, "forward", counting)
    monkeypatch.setattr(blend_head, "MAX_PROMPT", 7)
    part = llm.generate([text], params)[0]
    assert part.token_ids == whole.token_ids
    assert part.stats.cycles <= whole.stats.cycles + 1
    assert sum(num_read) <= 7 + len(part.token_ids)


# -- what requests learn -----------------------------------------------------------------------------------------------


def test_samples_of_a_prompt_share_what_they_learn() -> None:
    params = SamplingParams(max_tokens=16, temperature=0.6, seed=2, n=8)
    found = {}
    for memory in ("request", "prompt"):
        llm = blend_llm(TABLES, clock_target(), memory=memory, max_batch=1)
        samples = llm.generate([clock_text(3, 5)], params)
        found[memory] = [sample.stats.acceptance_length for sample in samples]
    assert found["prompt"][0] == found["request"][0]
    assert sum(found["prompt"][1:]) > 1.2 * sum(found["request"][1:])


def test_requests_share_what_they_learn_about_sources() -> None:
    """Per temperature: chances of the first tree change after a request, not after one of another temperature."""
    llm = blend_llm(TABLES, memory="request")

    def first_chances(temperature: float) -> tuple[float, ...]:
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=1)
        return next(iter(list(llm.stream("hello hello hello", params)))).tree.probs

    before, warm, after = (first_chances(temperature) for temperature in (0.0, 0.6, 0.0))
    assert warm == before
    assert after != before


@pytest.mark.parametrize("option", ["learn", "priors"])
def test_chances_without_learning_or_measured_priors(option: str) -> None:
    chances = []
    for value in (True, False):
        options = {"sources": "context+transition", option: value}
        llm = LLM.from_target(target_on(), ByteTokenizer(), drafter="blend", drafter_options=options, budget=12)
        events = list(llm.stream("hello hello hello", SamplingParams(max_tokens=24)))
        chances.append([event.tree.probs for event in events])
    assert (chances[0][0] == chances[1][0]) is (option == "learn")  # nothing has been learned before the first tree
    assert chances[0] != chances[1]


def test_every_source_has_a_name() -> None:
    assert tuple(SOURCES) == NAMES
