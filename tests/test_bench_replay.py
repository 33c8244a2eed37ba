"""Recording and replaying: the recorded method comes out as it ran, other methods are told only what is known."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from draftwood import LLM, SamplingParams
from draftwood.bench.methods import Method, parse_methods
from draftwood.bench.replay import (
    RecordedRequest,
    Recording,
    Replay,
    Tape,
    context_study,
    figure_notes,
    figure_rows,
    figures_of,
    load_recording,
    record,
    recording_drafter,
    replay,
    replay_methods,
    save_recording,
    trajectory_study,
)
from draftwood.bench.replay.dense import DenseRows, heights
from draftwood.bench.replay.likeness import Likeness
from draftwood.bench.replay.replayer import Script, path_of, places
from draftwood.bench.replay.rows import ON_TEXT, RowArrays, RowBook
from draftwood.bench.replay.scale import Filler
from draftwood.bench.tasks import Task, TaskPrompt
from draftwood.cli.main import build_parser
from draftwood.drafters import Drafter, DraftRequest, Verified, drafter_class
from draftwood.engine import RequestStats
from draftwood.errors import DraftwoodError, OptionError
from draftwood.target.native.target import NativeTarget
from draftwood.target.tiny import ByteTokenizer, tiny_target
from draftwood.target.toprows import top_rows
from draftwood.tree import DraftTree, TreeBuilder

TEXTS = ("hello hello hello", "the cat sat on the mat, the cat sat", "xyz" * 20)
GREEDY = SamplingParams(max_tokens=32, seed=0)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=3, n=3)


def task_of(*texts: str, turns: int = 1) -> Task:
    prompts = [TaskPrompt(id=str(n), turns=(text,) * turns, category=None) for n, text in enumerate(texts)]
    return Task(name="letters", prompts=prompts, source="here", sha256="")


def method_of(text: str, budget: int | str = 24, memory: str = "prompt") -> Method:
    return parse_methods([text], memory, [budget])[0]


@pytest.fixture(scope="module")
def target() -> NativeTarget:
    return tiny_target(cache_tokens=4096)


def recorded(
    target: NativeTarget,
    methods: Sequence[Method],
    params: SamplingParams = GREEDY,
    texts: Sequence[str] = TEXTS,
    **options: int,
) -> Recording:
    recording = Recording(target=target.info)
    record(target, ByteTokenizer(), methods, [task_of(*texts, **options)], params, recording)
    return recording


def really_run(target: NativeTarget, method: Method, params: SamplingParams) -> list[RequestStats]:
    """Without any recording, each prompt by itself."""
    with LLM.from_target(
        target,
        ByteTokenizer(),
        drafter=method.drafter,
        drafter_options=method.options,
        memory=method.memory,
        budget=method.budget,
        max_batch=1,
    ) as llm:
        prompts = [llm.tokenizer.apply_chat([{"role": "user", "content": text}]) for text in TEXTS]
        return [completion.stats for prompt in prompts for completion in llm.generate([prompt], params)]


def counts(stats: RequestStats) -> dict[str, Any]:
    return {
        name: value
        for name, value in stats.as_dict().items()
        if name not in ("seconds", "tokens_per_second", "reused_tokens")
    }


@pytest.fixture(scope="module")
def goose(target: NativeTarget) -> Recording:
    return recorded(target, [method_of("goose")])


# -- the recorded method comes out exactly as it ran -----------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["goose", "recycling", "pld", "sam", "iso3", "sequoia", "lookahead", "stand", "plain", "anpd"]
)
@pytest.mark.parametrize("memory", ["request", "process"])
def test_the_recorded_method_is_replayed_exactly(target: NativeTarget, name: str, memory: str) -> None:
    method = method_of(name, memory=memory)
    recording = recorded(target, [method])
    replays = replay(recording, method)
    assert [counts(result.stats) for result in replays] == [
        counts(stats) for stats in really_run(target, method, GREEDY)
    ]
    assert all(result.beside_known == result.beside for result in replays)


@pytest.mark.parametrize("name", ["goose", "recycling", "stand", "stand:draw=multinomial"])
def test_sampled_runs_of_the_recorded_method_are_replayed_exactly(target: NativeTarget, name: str) -> None:
    method = method_of(name)
    recording = recorded(target, [method], SAMPLED)
    assert [request.sample for request in recording.requests] == [0, 1, 2] * len(TEXTS)
    assert len({request.output_ids for request in recording.requests[:3]}) > 1
    replays = replay(recording, method)
    assert [counts(result.stats) for result in replays] == [
        counts(stats) for stats in really_run(target, method, SAMPLED)
    ]


@pytest.mark.parametrize("memory", ["prompt", "process"])
@pytest.mark.parametrize("stop_at", [3, 10, 11, 12])
def test_stop_tokens_inside_a_block_are_replayed_exactly(target: NativeTarget, stop_at: int, memory: str) -> None:
    """The token that stands at some place of the output ends it, wherever a tree carries it."""
    outputs = [request.output_ids for request in recorded(target, [method_of("plain")]).requests]
    params = SamplingParams(max_tokens=48, seed=0, stop_token_ids=tuple(ids[stop_at] for ids in outputs))
    method = method_of("goose", memory=memory)
    recording = recorded(target, [method], params)
    assert {request.finish_reason for request in recording.requests} == {"stop"}
    replays = replay(recording, method)
    assert [counts(result.stats) for result in replays] == [
        counts(stats) for stats in really_run(target, method, params)
    ]


def test_a_stop_that_was_only_ever_a_bonus_can_be_accepted_in_a_replay(target: NativeTarget) -> None:
    """Plain decoding never asks what follows the last token; a drafter that guesses it must not trip over that."""
    outputs = [request.output_ids for request in recorded(target, [method_of("plain")]).requests]
    params = SamplingParams(max_tokens=48, seed=0, stop_token_ids=(outputs[0][10],))
    recording = recorded(target, [method_of("plain")], params, TEXTS[:1])
    (request,) = recording.requests
    assert request.rows.find(ON_TEXT, len(request.text) - 1) is None

    class Oracle(Drafter):
        name = "oracle"

        def begin(self, draft: DraftRequest) -> None:
            self.left, self.last = list(request.output_ids), draft.prompt_ids[-1]

        def propose(self, budget: int) -> DraftTree:
            return DraftTree.chain([self.last, *self.left, 0][:budget], "oracle")

        def observe(self, verified: Verified) -> None:
            assert len(verified.path) == len(verified.tree)
            assert len(verified.logits) == len(verified.tree)
            self.left, self.last = self.left[len(verified.emitted) :], verified.emitted[-1]

    (result,) = replay_with(recording, Oracle, budget=24)
    assert (result.stats.cycles, result.stats.output_tokens) == (1, len(request.output_ids))
    assert result.stats.accepted_by_source["oracle"] == len(request.output_ids)


def replay_with(recording: Recording, drafter: type[Drafter], budget: int) -> list[Replay]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwood.drafters.registry.drafter_class", lambda name: drafter)
        return replay(recording, Method(label=drafter.name, drafter=drafter.name, memory="prompt", budget=budget))


# -- what other methods are told -------------------------------------------------------------------------------------


def hand_made(width: int = 4, vocab_size: int = 258) -> Recording:
    """The text 1 2 | 3 4 5, whose rows are known; beside it 2-9, 2-9-8 and 3-7."""
    book = RowBook(width)
    ids = np.arange(6 * width, dtype=np.int32).reshape(6, width)
    places_of = [(ON_TEXT, 1), (ON_TEXT, 2), (ON_TEXT, 3), (-2 - 0, 9), (-2 - 3, 8), (-2 - 1, 7)]
    book.add(places_of, ids, np.log(np.full((6, width), 0.1, np.float32)))
    request = RecordedRequest(
        task="t",
        prompt="p",
        prompt_ids=(1, 2),
        output_ids=(3, 4, 5),
        params=SamplingParams(max_tokens=3),
        finish_reason="length",
        rows=book,
    )
    info = tiny_target().info
    return Recording(target=info, width=width, requests=[request])


def test_the_tree_that_is_told_has_the_known_nodes_and_no_others() -> None:
    recording = hand_made()
    told: list[Verified] = []

    class Guess(Drafter):
        name = "guess"

        def begin(self, request: DraftRequest) -> None:
            self.last = request.prompt_ids[-1]

        def propose(self, budget: int) -> DraftTree:
            if told:
                return DraftTree.root_only(self.last)
            builder = TreeBuilder(2)
            nine, three = builder.add(0, 9, "x"), builder.add(0, 3, "x")
            eight, six = builder.add(nine, 8, "x"), builder.add(nine, 6, "x")  # 2-9-6 was never seen
            builder.add(eight, 1, "x")  # nor 2-9-8-1
            builder.add(six, 1, "x")
            builder.add(three, 7, "x")
            return builder.build()

        def observe(self, verified: Verified) -> None:
            told.append(verified._replace(logits=verified.logits.clone()))
            self.last = verified.emitted[-1]

    (result,) = replay_with(recording, Guess, budget=16)
    first = told[0]
    assert first.tree.tokens == (2, 9, 3, 8, 7)
    assert first.tree.parents == (-1, 0, 0, 1, 2)
    assert list(first.path) == [0, 2]
    assert list(first.emitted) == [3, 4]
    assert first.choices == [0, 12, 4, 16, 20]  # the first id of each row, in the order of hand_made
    assert first.logits.argmax(-1).tolist() == first.choices
    # 5 guesses beside the text (the limit of 3 tokens leaves depth 2, which cuts 2-9-8-1 and 2-9-6-1): 9, 8, 6, 7
    assert (result.beside, result.beside_known) == (4, 3)
    assert result.stats.cycles == 2  # 3 and the bonus 4; then 5
    assert result.stats.drafted_nodes == 5
    assert result.stats.tried_by_depth == {1: 1, 2: 1}
    assert result.stats.accepted_by_depth == {1: 1}
    assert figures_of(recording, method_of("pld"), [result]).tau == 1.5
    assert figures_of(recording, method_of("pld"), [result]).coverage == 0.75


def test_an_estimate_comes_from_the_nearest_context_that_ends_alike_and_never_from_the_text_ahead() -> None:
    likeness = Likeness(hand_made().requests[0])  # 1 2 | 3 4 5, beside it 2-9, 2-9-8 and 3-7; rows as in hand_made
    assert likeness.nearest(9, 8, root=1) == 4  # the pair
    assert likeness.nearest(6, 8, root=1) == 4  # the last token
    assert likeness.nearest(6, 7, root=1) == 5  # beside the text, further on
    assert likeness.nearest(2, 3, root=1) is None  # on the text, further on
    assert likeness.nearest(2, 3, root=2) == 1
    assert likeness.nearest(6, 100, root=3) is None


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=12), st.integers(0, 2), st.integers(0, 4))
def test_the_nearest_context_is_the_nearest_of_all(beside: list[tuple[int, int]], token: int, root: int) -> None:
    """Against a search through everything, over one guess each beside places 0 to 2 of the text 5 5 5 5."""
    book = RowBook(1)
    number = np.zeros((1, 1), np.int32)
    for position in range(3):
        book.add([(ON_TEXT, position)], number, np.zeros((1, 1), np.float32))
    for position, guess in beside:
        book.add([(position, guess)], number, np.zeros((1, 1), np.float32))
    request = RecordedRequest(
        **{**vars(hand_made().requests[0]), "prompt_ids": (5, 5), "output_ids": (5, 5), "rows": book}
    )
    found = Likeness(request).nearest(5, token, root)
    distances = [abs(position - root) for position, guess in beside if guess == token]
    if not distances:
        assert found is None
    else:
        assert found is not None
        assert abs(int(book.arrays().parents[found]) - root) == min(distances)
        assert book.arrays().labels[found] == token


def test_estimates_fill_in_what_is_unknown_and_change_nothing_that_is_known(goose: Recording) -> None:
    method = method_of("goose")
    exact, estimated = replay(goose, method), replay(goose, method, estimate=True)
    assert [counts(result.stats) for result in exact] == [counts(result.stats) for result in estimated]
    assert all(result.beside_estimated == 0 for result in estimated)
    (line,) = replay_methods(goose, [method_of("iso5")], estimate=True)
    assert line.coverage is not None
    assert line.estimated is not None
    assert 0.0 < line.estimated <= 1.0 - line.coverage
    assert "estimated" in figure_rows([line])[0]


def test_the_path_goes_on_behind_a_stop_as_the_engine_does_where_that_is_known() -> None:
    request = hand_made().requests[0]
    tree = DraftTree.chain([2, 3, 4, 5, 6, 7], "x")
    choices = [3, 4, 5, 6, 9, 0]  # behind the last token 5 the target says 6, then 9
    assert path_of(tree, (3, 4, 5), choices, request) == [0, 1, 2, 3, 4]
    assert path_of(tree, (3, 4), choices, request) == [0, 1, 2, 3, 4]
    warm = RecordedRequest(**{**vars(request), "params": SamplingParams(max_tokens=3, temperature=1.0)})
    assert path_of(tree, (3, 4, 5), choices, warm) == [0, 1, 2, 3]


def test_places_follow_the_text_from_any_root() -> None:
    script = Script(hand_made().requests[0], 258)
    on_text, rows = places(DraftTree.chain([3, 4, 5, 6], "x"), script, root=2)
    assert on_text == [2, 3, 4, None]
    assert rows == [1, 2, None, None]  # nothing is known behind the last token


def test_methods_that_record_the_same_texts_are_united(target: NativeTarget, goose: Recording) -> None:
    both = recorded(target, [method_of("goose"), method_of("recycling")])
    assert len(both.requests) == len(goose.requests)
    assert both.num_rows > goose.num_rows
    assert both.num_left_out == 0
    for name in ("goose", "recycling"):
        figures = figures_of(both, method_of(name), replay(both, method_of(name)))
        assert figures.tau == figures.recorded_tau
        assert figures.coverage == 1.0
    alone = figures_of(goose, method_of("recycling"), replay(goose, method_of("recycling")))
    assert alone.recorded_tau is None
    assert alone.coverage is not None
    assert alone.coverage < 1.0


def test_another_output_of_the_same_request_is_left_out() -> None:
    recording = hand_made()
    other = hand_made().requests[0]
    changed = RecordedRequest(**{**vars(other), "output_ids": (3, 4, 6)})
    recording.add(changed)
    assert (len(recording.requests), recording.num_left_out, recording.num_rows) == (1, 1, 6)


def test_recording_changes_nothing(target: NativeTarget) -> None:
    """Not even for a drafter that does not want to see the prompt's logits."""
    for name in ("stand:harvest_prompt=false", "goose"):
        method = method_of(name)
        (entry,) = recorded(target, [method]).methods
        stats = really_run(target, method, GREEDY)
        assert entry["cycles"] == sum(each.cycles for each in stats)
        assert entry["tokens"] == sum(each.output_tokens for each in stats)


def test_a_recording_drafter_is_a_drafter_like_any_other(target: NativeTarget) -> None:
    tape = Tape(8)
    cls = recording_drafter(drafter_class("stand"), tape)
    assert cls.name == "stand"
    with LLM.from_target(target, ByteTokenizer(), drafter=cls, drafter_options={"top_k": 5}, budget=8) as llm:
        completions = llm.generate("abc abc", SamplingParams(max_tokens=6, temperature=1.0, seed=1, n=2))
    requests = tape.take(completions, "t", "p")
    assert [request.sample for request in requests] == [0, 1]
    assert [list(request.output_ids) for request in requests] == [c.token_ids for c in completions]
    assert requests[0].rows.find(ON_TEXT, 0) is not None  # the prompt was read once
    assert requests[1].rows.find(ON_TEXT, 0) is None
    assert tape.take([], "t", "p") == []


def test_every_turn_of_a_conversation_is_a_request(target: NativeTarget) -> None:
    recording = recorded(target, [method_of("pld")], SamplingParams(max_tokens=6), ["ab ab"], turns=2)
    first, second = recording.requests
    assert (first.turn, second.turn) == (0, 1)
    assert len(second.prompt_ids) > len(first.text)


# -- rows ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([6, 7, 40, 258]))
def test_dense_rows_give_back_what_was_recorded(seed: int, width: int, vocab_size: int) -> None:
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4
    logits[0] = logits[0].round()  # ties
    top = top_rows(logits, width)
    above = heights(top.logits - top.log_total[:, None], vocab_size)
    again = top_rows(DenseRows(vocab_size).lend(top.ids, above), width)
    assert (again.ids == top.ids).all()
    np.testing.assert_allclose(again.probs(), top.probs(), rtol=2e-5, atol=2e-5)


def test_equal_and_nearly_equal_tokens_keep_their_order() -> None:
    logprobs = np.array([[-1.0, -1.0, np.nextafter(np.float32(-1.0), np.float32(-2.0))]], np.float32)
    ids = np.array([[7, 3, 1]], np.int32)  # against the order of ids
    assert top_rows(DenseRows(50).lend(ids, heights(logprobs, 50)), 3).ids.tolist() == [[7, 3, 1]]
    sure = np.array([[0.0, -60.0, -61.0]], np.float32)
    again = top_rows(DenseRows(50).lend(ids, heights(sure, 50)), 3)
    assert again.ids.tolist() == [[7, 3, 1]]
    assert again.probs()[0, 0] == pytest.approx(1.0, abs=1e-5)


def test_lent_rows_hold_nothing_of_earlier_ones() -> None:
    dense = DenseRows(20)
    dense.lend(np.array([[1, 2], [3, 4]], np.int32), np.full((2, 2), 5.0, np.float32))
    later = dense.lend(np.array([[7, 8]], np.int32), np.array([[3.0, 2.0]], np.float32))
    assert later.shape == (1, 20)
    assert later.nonzero().tolist() == [[0, 7], [0, 8]]
    both = dense.lend(np.array([[0, 1], [5, 6]], np.int32), np.ones((2, 2), np.float32))
    assert both.nonzero().tolist() == [[0, 0], [0, 1], [1, 5], [1, 6]]


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=20), st.lists(st.lists(st.integers(0, 3), max_size=4))
)
def test_uniting_books_keeps_every_context_once(first: list[list[int]], second: list[list[int]]) -> None:
    """Contexts here are runs of tokens beside position 0; each row holds a number that belongs to its run."""

    def number(run: Sequence[int]) -> int:
        return int("1" + "".join(map(str, run)))

    def book_of(runs: list[list[int]]) -> RowBook:
        book = RowBook(1)
        book.add([(ON_TEXT, 0)], np.array([[number([])]], np.int32), np.zeros((1, 1), np.float32))
        for run in runs:
            parent = 0
            for end, token in enumerate(run, start=1):
                row = np.array([[number(run[:end])]], np.int32)
                (parent,) = book.add([(parent, token)], row, np.zeros((1, 1), np.float32))
        return book

    united = book_of(first)
    united.unite(book_of(second))
    arrays = united.arrays()
    expected = {number(run[:end]) for run in [[], *first, *second] for end in range(len(run) + 1)}
    assert sorted(arrays.ids[:, 0].tolist()) == sorted(expected)
    again = RowBook.of(arrays)
    for run in [*first, *second]:
        row = again.find(ON_TEXT, 0)
        for end, token in enumerate(run, start=1):
            assert row is not None
            row = again.find(row, token)
            assert arrays.ids[row, 0] == number(run[:end])


# -- files -----------------------------------------------------------------------------------------------------------


def test_a_recording_comes_back_from_its_file(goose: Recording, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a.recording"
    save_recording(path, goose)
    again = load_recording(path)
    assert again.methods == goose.methods
    assert again.target == goose.target
    for ours, theirs in zip(goose.requests, again.requests, strict=True):
        assert {**vars(ours), "rows": None} == {**vars(theirs), "rows": None}
        for name in RowArrays._fields:
            np.testing.assert_array_equal(getattr(ours.rows.arrays(), name), getattr(theirs.rows.arrays(), name))
    method = method_of("goose")
    assert figures_of(again, method, replay(again, method)).tau == figures_of(goose, method, replay(goose, method)).tau
    assert [entry.name for entry in path.parent.iterdir()] == ["a.recording"]  # nothing half written


@pytest.fixture
def saved(goose: Recording, tmp_path: Path) -> Path:
    path = tmp_path / "a.recording"
    save_recording(path, goose)
    return path


def rewrite(path: Path, about: dict[str, str] | None = None, **arrays: Any) -> None:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    save_file({**load_file(path), **arrays}, path, {**metadata, **(about or {})})


def test_files_that_are_no_recordings_are_refused(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no recording")
    save_file({"a": np.zeros(1)}, tmp_path / "other")
    for name, what in (("absent", "cannot be read"), ("text", "cannot be read"), ("other", "is no recording")):
        with pytest.raises(DraftwoodError, match=what):
            load_recording(tmp_path / name)
    with pytest.raises(DraftwoodError, match="cannot be read"):
        load_recording(tmp_path)
    rewrite(saved, {"version": "99"})
    with pytest.raises(DraftwoodError, match=r"another version\n.*99"):
        load_recording(saved)


@pytest.mark.parametrize(
    "damage",
    [
        lambda a: {"tokens": a["tokens"][:-1]},
        lambda a: {"tokens": a["tokens"] + 400},
        lambda a: {"ids": a["ids"] - 1000},
        lambda a: {"logprobs": a["logprobs"] * np.float32(np.nan)},
        lambda a: {"parents": np.full_like(a["parents"], 5)},
        lambda a: {"labels": np.zeros_like(a["labels"])},
        lambda a: {"labels": a["labels"] + 500},  # no place of the text has a row
    ],
)
def test_damaged_recordings_are_refused(saved: Path, damage: Any) -> None:
    rewrite(saved, **damage(load_file(saved)))
    with pytest.raises(DraftwoodError, match="cannot be read as a recording"):
        load_recording(saved)


def test_empty_recordings_are_refused(goose: Recording, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(DraftwoodError, match="Nothing was recorded"):
        save_recording(tmp_path / "none", Recording(target=goose.target))
    assert not (tmp_path / "none").exists()
    with safe_open(saved, framework="numpy") as file:
        about = json.loads(file.metadata()["about"])
    rewrite(saved, {"about": json.dumps({**about, "requests": []})})
    with pytest.raises(DraftwoodError, match="empty recording"):
        load_recording(saved)


# -- what cannot be replayed -----------------------------------------------------------------------------------------


def test_methods_that_a_recording_cannot_tell_about_are_refused(goose: Recording) -> None:
    with pytest.raises(OptionError, match="depends on what passes cost"):
        replay(goose, method_of("goose", budget="auto"))
    with pytest.raises(OptionError, match=r"top_k 40\n.*at most 16\n.*--width 40"):
        replay(goose, method_of("goose:top_k=40"))
    with pytest.raises(OptionError, match=r"only itself makes.*\n.*a recording of goose"):
        replay(goose, method_of("lookahead"))


# -- studies of scale ------------------------------------------------------------------------------------------------


def test_long_contexts_are_other_prompts_texts_with_their_rows(goose: Recording) -> None:
    filler = Filler(goose)
    own, *others = goose.requests
    text = filler.before(0, 300)
    assert text is not None
    assert len(text.tokens) == 300 - len(own.prompt_ids)
    there = others[0].text + others[1].text
    assert text.tokens == (there * 9)[: len(text.tokens)]
    last = len(others[0].text) - 1
    assert not text.known[last]  # nothing is known behind the last token of a text
    assert text.known[:last].all()
    row = others[0].rows.find(ON_TEXT, 4)
    assert (text.ids[4] == others[0].rows.arrays().ids[row]).all()
    assert filler.before(0, len(own.prompt_ids)) is None


def test_a_conversation_is_no_context_for_itself(target: NativeTarget) -> None:
    recording = recorded(target, [method_of("pld")], SamplingParams(max_tokens=6), ["ab ab", "cd cd"], turns=2)
    text = Filler(recording).before(0, 400)
    assert text is not None
    others = recording.requests[2].text + recording.requests[3].text
    assert text.tokens == (others * 9)[: len(text.tokens)]


def test_a_drafter_reads_the_whole_context_but_what_is_unknown(goose: Recording) -> None:
    read: list[int] = []
    prompts: list[list[int]] = []

    class Reader(Drafter):
        name = "reader"
        wants_prompt_logits = True

        def begin(self, request: DraftRequest) -> None:
            prompts.append(list(request.prompt_ids))
            self.last = request.prompt_ids[-1]

        def read_prompt(self, start: int, logits: torch.Tensor) -> None:
            read.extend(range(start, start + len(logits)))

        def propose(self, budget: int) -> DraftTree:
            return DraftTree.root_only(self.last)

        def observe(self, verified: Verified) -> None:
            self.last = verified.emitted[-1]

    one = Recording(target=goose.target, requests=goose.requests[:1], methods=goose.methods)
    text = Filler(goose).before(0, 500)
    assert text is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftwood.drafters.registry.drafter_class", lambda name: Reader)
        replay(one, Method(label="r", drafter="reader", memory="prompt", budget=4), before=lambda number: text)
    assert prompts == [[*text.tokens, *goose.requests[0].prompt_ids]]
    unknown = np.flatnonzero(~text.known).tolist()
    assert unknown
    assert read == [place for place in range(499) if place not in unknown]


def test_context_study_has_a_line_for_each_length(goose: Recording) -> None:
    lines = context_study(goose, method_of("goose"), [1, 700])
    assert [line.context for line in lines] == [1, 700]
    plain = figures_of(goose, method_of("goose"), replay(goose, method_of("goose")))
    assert (lines[0].tau, lines[0].cycles) == (plain.tau, plain.cycles)  # every prompt is longer than one token
    assert {line.tokens for line in lines} == {plain.tokens}
    one = Recording(target=goose.target, requests=goose.requests[:1])
    with pytest.raises(OptionError, match="there are none"):
        context_study(one, method_of("goose"), [700])


def test_trajectory_study_counts_the_first_samples(target: NativeTarget) -> None:
    method = method_of("stand")
    recording = recorded(target, [method], SAMPLED)
    stats = really_run(target, method, SAMPLED)  # 3 samples of each prompt
    lines = trajectory_study(recording, method, [1, 2, 3])
    for line, count in zip(lines, (1, 2, 3), strict=True):
        first = [each for number, each in enumerate(stats) if number % 3 < count]
        assert line.trajectories == count
        assert line.requests == len(first)
        assert line.tokens == sum(each.output_tokens for each in first)
        assert line.cycles == sum(each.cycles for each in first)
    with pytest.raises(OptionError, match=r"allowed: 1 to 3\n.*--samples 64"):
        replay_methods(recording, [method], trajectories=[1, 64])
    with pytest.raises(OptionError, match="One study at a time"):
        replay_methods(recording, [method], trajectories=[1], contexts=[64])
    with pytest.raises(OptionError, match=r"got: .*auto"):
        replay_methods(recording, [method], contexts=["auto"])  # type: ignore[list-item]


def test_tables_show_columns_that_have_something_in_them(goose: Recording) -> None:
    lines = replay_methods(goose, [method_of("goose"), method_of("plain", 1)])
    header, first, second = figure_rows(lines)
    assert "context" not in header
    assert first[header.index("recorded")] == first[header.index("tau")]
    assert figure_notes(lines) == []
    assert "for goose:" in figure_notes([replace(lines[0], coverage=0.0)])[0]
    assert figure_notes([replace(lines[0], coverage=0.2, estimated=0.4)]) == []
    assert (second[header.index("known")], second[header.index("tau")]) == ("", "1.000")


# -- the commands ----------------------------------------------------------------------------------------------------


def command(*argv: str) -> argparse.Namespace:
    """As the program reads it: what `bench` itself has defaults for must not get in the way."""
    return build_parser().parse_args(["bench", *argv])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recordings")
    lines = [json.dumps({"id": str(n), "task": "letters", "turns": [text]}) for n, text in enumerate(TEXTS)]
    (folder / "letters.jsonl").write_text("\n".join(lines) + "\n")
    path = folder / "a.recording"
    options = ["--model", "tiny", "--data", str(folder), "--tasks", "letters", "--limit", "2", "--max-tokens", "16"]
    args = command("record", "--drafters", "goose,recycling:top_k=4", "--budget", "12", *options, "--out", str(path))
    assert args.run(args) == 0
    return path


def test_record_and_replay_from_the_command_line(
    file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "figures.json"
    args = command(
        "replay", str(file), "--drafters", "goose,recycling:top_k=4,pld", "--budget", "12", "--json", "--out", str(out)
    )
    assert args.run(args) == 0
    content = json.loads(capsys.readouterr().out)
    assert content == json.loads(out.read_text())
    goose, recycling, pld = content["figures"]
    assert content["model"] == "tiny"
    assert goose["tau"] == goose["recorded_tau"]
    assert recycling["tau"] == recycling["recorded_tau"]
    assert pld["recorded_tau"] is None
    args = command("replay", str(file), "--drafters", "goose", "--budget", "8,12", "--context", "64,200")
    assert args.run(args) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 4
    assert table[1].split()[:4] == ["goose", "@8", "8", "64"]


def test_an_interrupted_recording_is_kept(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate, calls = LLM.generate, []

    def interrupted(self: LLM, *args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(self, *args, **options)

    monkeypatch.setattr(LLM, "generate", interrupted)
    path = tmp_path / "part.recording"
    args = command("record", "--model", "tiny", "--data", str(file.parent), "--max-tokens", "8", "--out", str(path))
    with pytest.raises(KeyboardInterrupt):
        args.run(args)
    assert len(load_recording(path).requests) == 1
    assert "ended early" in capsys.readouterr().err


def test_a_recording_does_not_replace_a_folder(tmp_path: Path) -> None:
    args = command("record", "--model", "tiny", "--out", str(tmp_path))
    with pytest.raises(OptionError, match="this is a folder"):
        args.run(args)
