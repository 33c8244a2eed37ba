"""Drafts that start right after the target's pass, before the host knows the text that they continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.drafters import blend_head
from draftwood.drafters.blend_head import Expander
from draftwood.growth import MOST_LEVELS, OwnWorth, SearchRecord, Worth
from draftwood.growth.neural import Times
from draftwood.sizing import CostProfile, LiveCosts
from draftwood.sources.neural.base import DraftModel, DraftSegment, gather_rows
from draftwood.sources.neural.head import HeadModel
from draftwood.targets.base import ForwardOutput, PendingPass, Segment, chain_parents
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.native.weights import assemble
from draftwood.targets.searches import Found, SearchPlan
from draftwood.text.bytes import ByteTokenizer
from draftwood.tree import DraftTree
from draftwood.verify import accept_greedy
from tests.tools.neural import (
    CONFIG,
    _one_thread,  # noqa: F401 - fixtures
    draft_model,
    head_folder,
    mean_tree,
    neural_llm,
    random_tensors,
    same_as_plain,
)

PROMPTS = ["hello hello hello", [7, 8, 9], "the cat sat on the mat, the cat sat"]


class Answer(NamedTuple):
    """In place of ``DeviceAnswer``."""

    token_ids: Sequence[int]
    parents: Sequence[int]
    output: ForwardOutput


class Flight(PendingPass):
    def __init__(self, segments: Sequence[Segment], output: ForwardOutput) -> None:
        self._segments, self._output = segments, output

    def wait(self) -> ForwardOutput:
        return self._output

    def on_device(self) -> Any:
        if len(self._segments) > 1:
            return None
        (segment,) = self._segments
        return Answer(segment.token_ids, segment.parents, self._output)


class AsyncTarget(NativeTarget):
    """The next pass is launched before the last one is written out."""

    @classmethod
    def made(cls) -> AsyncTarget:
        tensors = random_tensors(CONFIG)
        target = cls("tiny", CONFIG, assemble(CONFIG, tensors.__getitem__), 8192)
        target.num_lanes = 2
        return target

    def launch(self, segments: Sequence[Segment], lane: int = 0) -> PendingPass:
        output = self.forward(segments)
        taps = None if output.taps is None else output.taps.clone()
        return Flight(
            segments, output._replace(logits=output.logits.clone(), greedy_ids=output.greedy_ids.clone(), taps=taps)
        )


class Launches:
    """Lets the head of an LLM search ahead, with passes that run when the host asks for the result."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        assert isinstance(self.model, HeadModel)
        self.model.searches_ahead, self.model.root_chunk = True, 16
        self.model.start_ahead = self.start  # type: ignore[method-assign]
        self.num_started = self.num_used = self.num_missed = 0

    def start(self, answer: Answer, sequence: int, plan: SearchPlan) -> Any:
        self.num_started += 1
        tree = DraftTree.unchecked(
            tokens=tuple(answer.token_ids),
            parents=tuple(answer.parents),
            depths=(0,) * len(answer.parents),
            sources=("",) * len(answer.parents),
            probs=(1.0,) * len(answer.parents),
            proposals={},
        )
        path = accept_greedy(tree, answer.output.greedy_ids.tolist())

        def finish(text: Sequence[int]) -> Found | None:
            if list(path.token_ids(tree)) != list(text):
                self.num_missed += 1
                return None
            self.num_used += 1
            assert answer.output.taps is not None
            return self._search(list(text), answer.output.taps[list(path.path)], sequence, plan)

        return finish

    def _search(self, text: list[int], taps: torch.Tensor, sequence: int, plan: SearchPlan) -> Found:
        """A beam search, in the records of targets/searches.py."""
        model, width, best = self.model, plan.width, plan.best
        group = width * best
        records = np.zeros((plan.passes + 1, 3 * group + 2 * width), np.int32)
        tokens, probs, values = (records[:, part * group : (part + 1) * group] for part in range(3))
        picks, depths = records[:, 3 * group : 3 * group + width], records[:, 3 * group + width :]
        picks[:] = -1
        values = values.view(np.float32)
        top = model.forward([DraftSegment(Segment(sequence, text, chain_parents(len(text)), 1), taps)], best)
        model.keep(sequence, range(len(text)))
        above, own = [0], [1.0]  # places and values of the nodes that were run
        for turn in range(plan.passes + 1):
            for row, (place, value) in enumerate(zip(above, own, strict=True)):
                part = slice(place * best, place * best + top.ids.shape[1])
                chances = top.probs()[row]
                tokens[turn, part], probs.view(np.float32)[turn, part] = top.ids[row], chances
                values[turn, part] = value * chances
            if turn == plan.passes:
                break
            chosen = [int(c) for c in np.argsort(-values[turn], kind="stable")[:width] if values[turn, c] > 0]
            picks[turn + 1, : len(chosen)] = [turn * group + c for c in chosen]
            depths[turn + 1, : len(chosen)] = turn + 1
            parents = [-1 if turn == 0 else (turn - 1) * width + c // best for c in chosen]
            pad = width - len(chosen)
            ids = [*tokens[turn, chosen].tolist(), *[0] * pad]
            top = model.forward(
                [DraftSegment(Segment(sequence, ids, [*parents, *[-1] * pad], width, turn * width))], best
            )
            above, own = list(range(len(chosen))), values[turn, chosen].tolist()
        return Found(records, 1, 0, width, best)


def new_llm(**options: Any) -> tuple[LLM, Launches]:
    llm = neural_llm("eagle3", AsyncTarget.made(), **options)
    return llm, Launches(draft_model(llm))


@pytest.mark.parametrize("budget", [3, 12, 40, "auto"])
def test_the_same_trees_as_without(budget: int | str) -> None:
    found = []
    for is_ahead in (False, True):
        llm, launches = new_llm(budget=budget, max_batch=1)
        launches.model.searches_ahead = is_ahead
        results = same_as_plain(llm, PROMPTS, SamplingParams(max_tokens=24))
        found.append([(each.stats.cycles, each.stats.mean_tree_size) for each in results])
        assert mean_tree(results) > 1
        if is_ahead and budget != "auto":
            assert launches.num_used == sum(each.stats.cycles - 1 for each in results)
        assert bool(launches.num_started) == is_ahead
    if budget != "auto":  # which depends on the time
        assert found[0] == found[1]


def test_only_for_what_the_device_can_know() -> None:
    llm, launches = new_llm(max_batch=1)
    for params in (
        SamplingParams(max_tokens=8, repetition_penalty=1.3),
        SamplingParams(max_tokens=8, logit_bias={5: 2.0}),
        SamplingParams(max_tokens=1),
    ):
        same_as_plain(llm, PROMPTS[:1], params)
    assert launches.num_started == 0


def test_a_batch_drafts_together() -> None:
    """Once the other requests have ended, the last one drafts ahead; what was launched before others came is lost."""
    llm, launches = new_llm(max_batch=2)
    for prompts in (PROMPTS[:1], PROMPTS[:2], PROMPTS):
        before = launches.num_started
        same_as_plain(llm, prompts, SamplingParams(max_tokens=16))
        assert launches.num_started > before or len(prompts) == 2
    assert launches.num_used > 0


def test_a_text_that_the_device_did_not_expect() -> None:
    """The host accepts less than the device: as at a stop condition, but here the request goes on."""
    llm, launches = new_llm(max_batch=1)
    wrong = launches.start

    def start(answer: Answer, sequence: int, plan: SearchPlan) -> Any:
        greedy = answer.output.greedy_ids.clone()
        if launches.num_started % 3 == 1:
            greedy[:] = (greedy + 1) % CONFIG.vocab_size
        return wrong(answer._replace(output=answer.output._replace(greedy_ids=greedy)), sequence, plan)

    launches.model.start_ahead = start  # type: ignore[assignment,method-assign]
    same_as_plain(llm, PROMPTS, SamplingParams(max_tokens=24))
    assert launches.num_missed > 0
    assert launches.num_used > 0


@pytest.mark.parametrize("budget", [24, "auto"])
def test_the_head_of_a_blend(budget: int | str) -> None:
    llm = LLM.from_target(
        AsyncTarget.made(),
        ByteTokenizer(),
        drafter="blend",
        drafter_options={"head": head_folder("eagle3")},
        budget=budget,
        max_batch=2,
    )
    launches = Launches(llm._default._shared.head.model)
    launches.model.searches = True
    params = SamplingParams(max_tokens=40)
    for prompts in (PROMPTS[:1], PROMPTS, PROMPTS[1:2]):
        results, plain = llm.generate(prompts, params), llm.generate(prompts, params, drafter="plain")
        assert [each.token_ids for each in results] == [each.token_ids for each in plain]
    assert launches.num_used > (0 if budget == "auto" else 40)
    assert launches.num_missed == 0


def choose_all(record: SearchRecord, times: Times, *_: Any) -> None:
    times.chosen = times.upcoming = MOST_LEVELS


@pytest.fixture
def blended(monkeypatch: pytest.MonkeyPatch) -> tuple[LLM, Launches]:
    """A blend whose head searches by itself, always all levels, where drafts cost nothing."""
    monkeypatch.setattr(SearchRecord, "choose", choose_all)
    monkeypatch.setattr(Worth, "begins_with_model", lambda _: True)
    options = {"sources": "context+transition+position+head", "head": head_folder("eagle3")}
    llm = LLM.from_target(
        AsyncTarget.made(), ByteTokenizer(), drafter="blend", drafter_options=options, budget="auto", max_batch=2
    )
    llm.engine._costs = LiveCosts(CostProfile((1, 64), (16,), ((1.0, 1.0),)))  # hours, for this machine's clock
    launches = Launches(llm._default._shared.head.model)
    launches.model.searches = True
    return llm, launches


LONG = SamplingParams(max_tokens=40, ignore_eos=True)


def test_a_blend_leaves_a_head_that_does_not_pay(
    blended: tuple[LLM, Launches], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, launches = blended
    plain = {count: llm.generate(PROMPTS[:count], LONG, drafter="plain") for count in (1, 2)}

    def num_searches(count: int) -> int:
        launches.num_used = 0
        answers = llm.generate(PROMPTS[:count], LONG)
        assert [each.token_ids for each in answers] == [each.token_ids for each in plain[count]]
        return launches.num_used

    most = num_searches(1)
    monkeypatch.setattr(OwnWorth, "pays", property(lambda _: launches.num_used < 3))
    assert 3 <= num_searches(1) < most  # it leaves within the answer
    num_searches(2)
    monkeypatch.setattr(Worth, "begins_with_model", lambda _: False)
    assert num_searches(1) == 0
    assert launches.model._cache.can_open(launches.model._cache.num_slots)


def test_a_blend_times_cycles_in_which_nobody_else_drafts(
    blended: tuple[LLM, Launches], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = blended
    noted = list[bool]()
    monkeypatch.setattr(Worth, "note_cycle", lambda _, seconds, has_model: noted.append(has_model))
    cycles = llm.generate(PROMPTS[:1], LONG)[0].stats.cycles
    assert noted == [True] * len(noted)
    assert cycles - 2 <= len(noted) <= cycles
    noted.clear()
    both = llm.generate([PROMPTS[0], PROMPTS[0] + "!"], LONG)
    assert len(noted) <= abs(both[0].stats.cycles - both[1].stats.cycles) + 2
    monkeypatch.setattr(Worth, "begins_with_model", lambda _: False)
    noted.clear()
    cycles = llm.generate(PROMPTS[:1], LONG)[0].stats.cycles
    assert noted == [False] * len(noted)
    assert cycles - 2 <= len(noted) <= cycles


def test_a_blend_notes_its_searches_while_the_next_pass_runs(
    blended: tuple[LLM, Launches], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _ = blended
    running, noted = list[bool](), list[bool]()
    draft_ahead, note_tree = Expander.draft_ahead, SearchRecord.note_tree

    def ahead(self: Expander, *args: Any) -> None:
        running.append(True)
        draft_ahead(self, *args)
        running.clear()

    def note(self: SearchRecord, *args: Any) -> Any:
        noted.append(bool(running))
        return note_tree(self, *args)

    monkeypatch.setattr(Expander, "draft_ahead", ahead)
    monkeypatch.setattr(SearchRecord, "note_tree", note)
    cycles = llm.generate(PROMPTS[:1], LONG)[0].stats.cycles
    assert noted.count(True) >= cycles - 4
    assert len(noted) >= cycles - 2  # the last one too


def test_an_error_ends_the_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, launches = new_llm(max_batch=1)

    def fail(*_: Any) -> Any:
        raise RuntimeError("no room on the device")

    monkeypatch.setattr(launches.model, "start_ahead", fail)
    with pytest.raises(RuntimeError, match="no room"):
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=8))
    same_as_plain(llm, PROMPTS[:1], SamplingParams(max_tokens=1))


def test_passes_with_hidden_states_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, _ = new_llm(max_batch=1)
    target, prepared = llm.engine.target, list[tuple[int, ...]]()
    monkeypatch.setattr(target, "prepare", lambda *_: prepared.append(target._taps))
    for drafter in ("plain", None, None):
        llm.generate(PROMPTS, SamplingParams(max_tokens=2), drafter=drafter)
    assert prepared == [(), (1, 3, 6)]


def test_a_prompt_that_is_not_read_yet_is_forgotten_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that has not drafted keeps the last tokens of the text, wherever its parts begin."""
    monkeypatch.setattr(blend_head, "MAX_UNREAD", 6)
    head = object.__new__(blend_head.BlendHead)
    head._unread, head._features = list(range(5)), [(torch.arange(5.0)[:, None], None)]

    def observe(self: blend_head.BlendHead, _: Any) -> None:
        self._unread += [5, 6]
        self._features.append((torch.tensor([[5.0], [99.0], [6.0]]), [0, 2]))

    monkeypatch.setattr(blend_head.HeadDrafter, "observe", observe)
    head.observe(None)  # type: ignore[arg-type]
    assert head._unread == [1, 2, 3, 4, 5, 6]
    kept = torch.cat([gather_rows(*part) for part in head._features])
    assert kept[:, 0].tolist() == head._unread


def test_a_head_that_rests_before_its_first_draft_reads_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[list[int]]()
    head = object.__new__(blend_head.BlendHead)
    head._unread, head._features = [1, 2, 3, 8], [(torch.zeros(3, 1), None), (torch.zeros(9, 1), [4])]
    head._is_borrowing, head._length, head._sequence = True, 0, 0
    monkeypatch.setattr(blend_head.HeadDrafter, "_read_text", lambda self, _: read.append(list(self._unread)))
    head.skip([9, 10])
    assert read == [[1, 2, 3]]  # what is known about 8 lies in memory that the target has overwritten
    assert (head._unread, head._features, head._root, head._goes_ahead) == ([], [], 10, False)
