"""Work that a large plain batch avoids: unused text, unused views, rebuilding trees of one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from draftwood.config import EngineOptions, SamplingParams
from draftwood.drafters import Drafter, DraftRequest, VerifiedTree, make_factory
from draftwood.engine import Engine, GenerationRequest, TokenEvent
from draftwood.targets.base import ForwardOutput, PendingPass, Segment
from draftwood.targets.load import Loaded
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import VOCAB_SIZE, ByteTokenizer
from draftwood.train.data.answers import Answerer
from draftwood.train.data.dialogue import Dialogue, SelfMade
from draftwood.train.data.prompts import Prompt
from draftwood.tree import DraftTree
from tests.tools.engine import make_llm
from tests.tools.train_data import rules_of, user

PROMPTS = ("hello hello", "a", "the cat sat on the mat")


class CountingCodec(ByteTokenizer):
    """Counts the calls that decode text."""

    def __init__(self) -> None:
        self.asked = 0

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        self.asked += 1
        return super().decode(ids, skip_special=skip_special)


class Watching(Drafter):
    """A plain drafter that keeps the observed trees."""

    name = "watching"
    shown: ClassVar[list[tuple[str, torch.Tensor, Sequence[int]]]] = []

    def begin(self, request: DraftRequest) -> None:
        self._last = request.prompt_ids[-1]

    def propose(self, budget: int) -> DraftTree:
        return DraftTree.root_only(self._last)

    def observe(self, verified: VerifiedTree) -> None:
        self._last = verified.emitted[-1]
        self.shown.append((self.name, verified.logits.clone(), verified.choices))


class NotLooking(Watching):
    name = "not-looking"
    wants_logits = False


def events_of(
    params: SamplingParams, *, with_text: bool, drafter: Any = "goose", codec: ByteTokenizer | None = None
) -> list[list[TokenEvent]]:
    codec = codec or ByteTokenizer()
    target = tiny_target()
    engine = Engine(target, codec, EngineOptions(budget=12, max_batch=4))
    factory = make_factory(drafter, None, target, codec=codec)
    ids = [
        request_id
        for prompt in PROMPTS
        for request_id in engine.submit(
            GenerationRequest(
                prompt_ids=tuple(codec.encode(prompt)), params=params, drafter=factory, with_text=with_text
            )
        )
    ]
    found: dict[int, list[TokenEvent]] = {request_id: [] for request_id in ids}
    for event in engine.events(ids):
        found[event.request_id].append(event)
    return list(found.values())


def told(events: list[TokenEvent]) -> list[object]:
    return [(e.token_ids, e.sources, e.finish_reason, e.path, e.stats.routes) for e in events]


@pytest.mark.parametrize("drafter", ["plain", "goose"])
def test_events_are_equal_without_text(drafter: str) -> None:
    params = SamplingParams(max_tokens=40)
    silent_codec, codec = CountingCodec(), CountingCodec()
    read = events_of(params, with_text=True, drafter=drafter, codec=codec)
    unread = events_of(params, with_text=False, drafter=drafter, codec=silent_codec)
    assert [told(events) for events in read] == [told(events) for events in unread]
    assert all(len(e.texts) == len(e.token_ids) for events in read + unread for e in events)
    assert "".join(e.text for events in read for e in events)
    assert not "".join(e.text for events in unread for e in events)
    assert codec.asked > 0
    assert silent_codec.asked == 0


@pytest.mark.parametrize("drafter", ["plain", "goose"])
def test_stop_strings_end_a_request_without_text(drafter: str) -> None:
    whole = events_of(SamplingParams(max_tokens=40), with_text=True, drafter=drafter)
    texts = ["".join(e.text for e in events) for events in whole]
    stop = next(c for c in texts[0][5:] if c.isascii())
    cut = [events_of(SamplingParams(max_tokens=40, stop=(stop,)), with_text=w, drafter=drafter) for w in (True, False)]
    assert [told(events) for events in cut[0]] == [told(events) for events in cut[1]]
    assert "".join(e.text for e in cut[0][0]) == texts[0].split(stop)[0]
    assert cut[1][0][-1].finish_reason == "stop"
    assert sum(len(e.token_ids) for e in cut[1][0]) < 40


def test_watching_drafter_gets_its_own_rows_in_mixed_batch() -> None:
    Watching.shown.clear()
    codec, target = ByteTokenizer(), tiny_target()
    engine = Engine(target, codec, EngineOptions(budget=4, max_batch=4))
    factories = [make_factory(kind, None, target, codec=codec) for kind in (NotLooking, Watching, NotLooking)]
    ids = [
        engine.submit(
            GenerationRequest(
                prompt_ids=tuple(codec.encode(prompt)),
                params=SamplingParams(max_tokens=9, ignore_eos=True),
                drafter=factory,
            )
        )[0]
        for prompt, factory in zip(PROMPTS, factories, strict=True)
    ]
    for _ in engine.events(ids):
        pass
    looked = [(logits, choices) for name, logits, choices in Watching.shown if name == "watching"]
    assert len(looked) == 9
    for logits, choices in looked:
        assert logits.shape == (1, VOCAB_SIZE)
        assert logits.argmax(-1).tolist() == list(choices)


def test_batch_output_is_split_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    split, times = ForwardOutput.split, []

    def counted(self: ForwardOutput, segments: Sequence[Segment]) -> list[ForwardOutput]:
        times.append(len(segments))
        return split(self, segments)

    monkeypatch.setattr(ForwardOutput, "split", counted)
    plain = events_of(SamplingParams(max_tokens=9), with_text=True, drafter="plain")
    assert not times
    asked = events_of(SamplingParams(max_tokens=9, logprobs=2), with_text=True, drafter="plain")
    assert times
    assert [told(events) for events in asked] == [told(events) for events in plain]
    emitted = [(tuple(entry.token_id for entry in e.logprobs), e.token_ids) for events in asked for e in events]
    assert all(named == token_ids for named, token_ids in emitted)


def test_root_only_tree_has_int_token() -> None:
    assert DraftTree.root_only(7) == DraftTree((7,), (-1,), (0,), ("root",), (1.0,))
    DraftTree.root_only(np.int64(8))
    assert type(DraftTree.root_only(8).tokens[0]) is int
    assert DraftTree.root_only(8).child_with(0, 8) is None


def test_dialogue_reads_text_only_of_answers_with_next_turn() -> None:
    rules = rules_of(ByteTokenizer())
    dialogue, made = Dialogue(0, Prompt("here", (user("Hi"), user("And?"))), rules), SelfMade(0, 0, rules)
    dialogue.ask()
    made.ask()
    assert (dialogue.reads_text, made.reads_text) == (True, True)
    dialogue.take([65], "A")
    made.take([65], "Why?")
    asks = dialogue.ask(), made.ask()
    for ask, known in zip(asks, ("A", "Why?"), strict=True):
        assert ask is not None
        assert known in rules.codec.decode(ask.prompt_ids)
    assert (dialogue.reads_text, made.reads_text) == (False, False)


def test_outputs_are_equal_with_and_without_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def transcripts(target: NativeTarget) -> list[list[int]]:
        codec = ByteTokenizer()
        turns = (user("Hi"), user("And?"))
        dialogues = [Dialogue(n, Prompt("here", turns[: 1 + n % 2]), rules_of(codec)) for n in range(4)]
        answerer = Answerer(Loaded(target, codec), "plain", 3)
        answerer.run(dialogues, lambda _: None, lambda: None)
        return [ids.tolist() for each in dialogues for ids, _ in each.transcript.examples()]

    spared = transcripts(tiny_target())
    monkeypatch.setattr(Dialogue, "reads_text", True)
    assert spared == transcripts(tiny_target())


@pytest.mark.parametrize("room", [1, 40, 100])
def test_new_prompts_share_passes_of_bounded_size(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """Many at once: prompts that do not fit in a pass wait for the next; nothing else changes."""
    prompts = [letter * 30 for letter in "abcdefghij"]
    params = SamplingParams(max_tokens=6)
    with make_llm(max_batch=10, drafter="pld") as llm:
        expected = [each.token_ids for each in llm.generate(prompts, params)]
    monkeypatch.setattr("draftwood.engine.step.MAX_PREFILL_ROWS", room)
    with make_llm(max_batch=10, drafter="pld") as llm:
        sizes: list[int] = []
        launch = llm.engine.target.launch

        def noted(segments: Sequence[Segment], lane: int = 0) -> PendingPass:
            sizes.append(sum(len(each.token_ids) for each in segments if len(each.token_ids) > llm.budget))
            return launch(segments, lane)

        monkeypatch.setattr(llm.engine.target, "launch", noted)
        assert [each.token_ids for each in llm.generate(prompts, params)] == expected
    assert max(sizes) < room + 31
    assert sum(sizes) == 10 * 30  # the last token of a prompt is the first root, and one opens it
