"""Recording and replaying: the recorded method is reproduced exactly; other methods get only recorded rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood import LLM, SamplingParams
from draftwood.bench.replay import (
    RecordedRequest,
    Recorder,
    Recording,
    compute_figures,
    format_figures,
    load_recording,
    make_recording_drafter,
    replay,
    replay_methods,
    save_recording,
)
from draftwood.bench.replay.nearest_rows import NearestRows
from draftwood.bench.replay.replayer import ReplayScript, find_path, locate_nodes
from draftwood.bench.replay.rows import ON_TEXT, RowStore
from draftwood.drafters import Drafter, DraftRequest, VerifiedTree, drafter_class
from draftwood.errors import OptionError
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from draftwood.text.bytes import ByteTokenizer
from draftwood.tree import DraftTree, TreeBuilder
from tests.tools.replay import (  # noqa: F401 - fixtures
    GREEDY,
    SAMPLED,
    TEXTS,
    counts,
    goose,
    hand_made_recording,
    method_of,
    recorded,
    replay_with,
    run_without_recording,
    target,
)

# -- the recorded method is reproduced exactly -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["goose", "recycling", "pld", "sam", "iso3", "sequoia", "lookahead", "stand", "plain", "anpd"]
)
@pytest.mark.parametrize("memory", ["request", "process"])
def test_the_recorded_method_is_replayed_exactly(target: NativeTarget, name: str, memory: str) -> None:
    method = method_of(name, memory=memory)
    recording = recorded(target, [method])
    replays = replay(recording, method)
    assert [counts(result.stats) for result in replays] == [
        counts(stats) for stats in run_without_recording(target, method, GREEDY)
    ]
    assert all(result.off_text_known == result.off_text for result in replays)


@pytest.mark.parametrize("name", ["goose", "recycling", "stand", "stand:draw=multinomial"])
def test_sampled_runs_of_the_recorded_method_are_replayed_exactly(target: NativeTarget, name: str) -> None:
    method = method_of(name)
    recording = recorded(target, [method], SAMPLED)
    assert [request.sample for request in recording.requests] == [0, 1, 2] * len(TEXTS)
    assert len({request.output_ids for request in recording.requests[:3]}) > 1
    replays = replay(recording, method)
    assert [counts(result.stats) for result in replays] == [
        counts(stats) for stats in run_without_recording(target, method, SAMPLED)
    ]


def test_plain_samples_are_recorded_in_batches(target: NativeTarget) -> None:
    one, together = (recorded(target, [method_of("plain")], SAMPLED, batch=batch) for batch in (1, 3))
    for alone, beside in zip(one.requests, together.requests, strict=True):
        assert alone.output_ids == beside.output_ids
        assert (alone.prompt, alone.sample) == (beside.prompt, beside.sample)
        assert len(alone.rows) == len(beside.rows)
    replays = [replay(recording, method_of("recycling")) for recording in (one, together)]
    assert [counts(each.stats) for each in replays[0]] == [counts(each.stats) for each in replays[1]]
    with pytest.raises(OptionError, match="Only plain decoding is recorded in batches"):
        recorded(target, [method_of("plain"), method_of("goose")], SAMPLED, batch=2)
    with pytest.raises(OptionError, match="At least one sample"):
        recorded(target, [method_of("plain")], SAMPLED, batch=0)


@pytest.mark.parametrize("memory", ["prompt", "process"])
@pytest.mark.parametrize("stop_at", [3, 10, 11, 12])
def test_stop_tokens_inside_a_block_are_replayed_exactly(target: NativeTarget, stop_at: int, memory: str) -> None:
    """A token of the output is the stop token, at any position in a tree."""
    outputs = [request.output_ids for request in recorded(target, [method_of("plain")]).requests]
    params = SamplingParams(max_tokens=48, seed=0, stop_token_ids=tuple(ids[stop_at] for ids in outputs))
    method = method_of("goose", memory=memory)
    recording = recorded(target, [method], params)
    assert {request.finish_reason for request in recording.requests} == {"stop"}
    replays = replay(recording, method)
    assert [counts(result.stats) for result in replays] == [
        counts(stats) for stats in run_without_recording(target, method, params)
    ]


@pytest.mark.parametrize("name", ["recycling:harvest=accepted", "goose"])
def test_sampled_stops_inside_a_block_are_replayed_exactly(target: NativeTarget, name: str, tmp_path: Path) -> None:
    """Tokens accepted after the stop are learned too, and the next sample drafts from them."""
    outputs = [request.output_ids for request in recorded(target, [method_of("plain")]).requests]
    stops = tuple({ids[place] for ids in outputs for place in (12, 13, 17)})
    params = SamplingParams(max_tokens=48, temperature=0.4, seed=0, n=4, stop_token_ids=stops)
    method = method_of(name, memory="process")
    recording = recorded(target, [method], params)
    assert any(request.accepted_after_stop for request in recording.requests)
    save_recording(tmp_path / "a.recording", recording)
    replays = replay(load_recording(tmp_path / "a.recording"), method)
    assert [counts(result.stats) for result in replays] == [
        counts(stats) for stats in run_without_recording(target, method, params)
    ]


def test_eos_is_replayed_exactly() -> None:
    """Greedy, with the end in the middle of a block."""
    outputs = [request.output_ids for request in recorded(tiny_target(), [method_of("plain")]).requests]
    ended = tiny_target(replace(TINY_CONFIG, eos_token_ids=tuple({ids[14] for ids in outputs})), cache_tokens=4096)
    method = method_of("goose", memory="process")
    recording = recorded(ended, [method])
    assert {request.finish_reason for request in recording.requests} == {"stop"}
    assert [counts(result.stats) for result in replay(recording, method)] == [
        counts(stats) for stats in run_without_recording(ended, method, GREEDY)
    ]


def test_stop_recorded_as_bonus_can_be_accepted_in_replay(target: NativeTarget) -> None:
    """Plain decoding does not compute what follows the last token; a drafter that guesses it must not fail."""
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

        def observe(self, verified: VerifiedTree) -> None:
            assert len(verified.path) == len(verified.tree)
            assert len(verified.logits) == len(verified.tree)
            self.left, self.last = self.left[len(verified.emitted) :], verified.emitted[-1]

    (result,) = replay_with(recording, Oracle, budget=24)
    assert (result.stats.cycles, result.stats.output_tokens) == (1, len(request.output_ids))
    assert result.stats.accepted_by_source["oracle"] == len(request.output_ids)


# -- what other methods get ------------------------------------------------------------------------------------------


def test_observed_tree_contains_only_known_nodes() -> None:
    recording = hand_made_recording()
    told: list[VerifiedTree] = []

    class Guess(Drafter):
        name = "guess"

        def begin(self, request: DraftRequest) -> None:
            self.last = request.prompt_ids[-1]

        def propose(self, budget: int) -> DraftTree:
            if told:
                return DraftTree.root_only(self.last)
            builder = TreeBuilder(2)
            nine, three = builder.add(0, 9, "x"), builder.add(0, 3, "x")
            eight, six = builder.add(nine, 8, "x"), builder.add(nine, 6, "x")  # 2-9-6 was not recorded
            builder.add(eight, 1, "x")  # nor 2-9-8-1
            builder.add(six, 1, "x")
            builder.add(three, 7, "x")
            return builder.build()

        def observe(self, verified: VerifiedTree) -> None:
            told.append(verified._replace(logits=verified.logits.clone()))
            self.last = verified.emitted[-1]

    (result,) = replay_with(recording, Guess, budget=16)
    first = told[0]
    assert first.tree.tokens == (2, 9, 3, 8, 7)
    assert first.tree.parents == (-1, 0, 0, 1, 2)
    assert list(first.path) == [0, 2]
    assert list(first.emitted) == [3, 4]
    assert first.choices == [0, 12, 4, 16, 20]  # the first id of each row, in the order of hand_made_recording
    assert first.logits.argmax(-1).tolist() == first.choices
    # 5 guesses off the text (the limit of 3 tokens leaves depth 2, which cuts 2-9-8-1 and 2-9-6-1): 9, 8, 6, 7
    assert (result.off_text, result.off_text_known) == (4, 3)
    assert result.stats.cycles == 2  # 3 and the bonus 4; then 5
    assert result.stats.drafted_nodes == 5
    assert result.stats.tried_by_depth == {1: 1, 2: 1}
    assert result.stats.accepted_by_depth == {1: 1}
    assert compute_figures(recording, method_of("pld"), [result]).tau == 1.5
    assert compute_figures(recording, method_of("pld"), [result]).coverage == 0.75


def test_estimate_uses_nearest_matching_context_not_future_text() -> None:
    likeness = NearestRows(
        hand_made_recording().requests[0]
    )  # 1 2 | 3 4 5 with the branches 2-9, 2-9-8 and 3-7; rows as in hand_made_recording
    assert likeness.nearest(9, 8, root=1) == 4  # the pair
    assert likeness.nearest(6, 8, root=1) == 4  # the last token
    assert likeness.nearest(6, 7, root=1) == 5  # off the text, later
    assert likeness.nearest(2, 3, root=1) is None  # on the text, later
    assert likeness.nearest(2, 3, root=2) == 1
    assert likeness.nearest(6, 100, root=3) is None


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=12), st.integers(0, 2), st.integers(0, 4))
def test_nearest_context_matches_exhaustive_search(beside: list[tuple[int, int]], token: int, root: int) -> None:
    """Compared with an exhaustive search, with one guess at each of the positions 0 to 2 of the text 5 5 5 5."""
    book = RowStore(1)
    number = np.zeros((1, 1), np.int32)
    for position in range(3):
        book.add([(ON_TEXT, position)], number, np.zeros((1, 1), np.float32))
    for position, guess in beside:
        book.add([(position, guess)], number, np.zeros((1, 1), np.float32))
    request = RecordedRequest(
        **{**vars(hand_made_recording().requests[0]), "prompt_ids": (5, 5), "output_ids": (5, 5), "rows": book}
    )
    found = NearestRows(request).nearest(5, token, root)
    distances = [abs(position - root) for position, guess in beside if guess == token]
    if not distances:
        assert found is None
    else:
        assert found is not None
        assert abs(int(book.arrays().parents[found]) - root) == min(distances)
        assert book.arrays().labels[found] == token


def test_estimates_fill_unknown_rows_only(goose: Recording) -> None:
    method = method_of("goose")
    exact, estimated = replay(goose, method), replay(goose, method, estimate=True)
    assert [counts(result.stats) for result in exact] == [counts(result.stats) for result in estimated]
    assert all(result.off_text_estimated == 0 for result in estimated)
    (line,) = replay_methods(goose, [method_of("iso5")], estimate=True)
    assert line.coverage is not None
    assert line.estimated is not None
    assert 0.0 < line.estimated <= 1.0 - line.coverage
    assert "estimated" in format_figures([line])[0]


def test_replay_continues_after_stop_like_the_engine() -> None:
    request = hand_made_recording().requests[0]
    tree = DraftTree.chain([2, 3, 4, 5, 6, 7], "x")
    choices = [3, 4, 5, 6, 9, 0]  # after the last token 5 the target predicts 6, then 9
    assert find_path(tree, (3, 4, 5), choices, request) == [0, 1, 2, 3, 4]
    assert find_path(tree, (3, 4), choices, request) == [0, 1, 2, 3, 4]
    warm = RecordedRequest(**{**vars(request), "params": SamplingParams(max_tokens=3, temperature=1.0)})
    assert find_path(tree, (3, 4, 5), choices, warm) == [0, 1, 2, 3]
    assert find_path(tree, (3, 4, 5), choices, replace(warm, accepted_after_stop=(6, 7))) == [0, 1, 2, 3, 4, 5]
    assert find_path(tree, (3, 4, 5), choices, replace(warm, accepted_after_stop=(6, 8))) == [0, 1, 2, 3, 4]


def test_nodes_are_located_on_the_text_from_any_root() -> None:
    script = ReplayScript(hand_made_recording().requests[0], 258)
    on_text, rows = locate_nodes(DraftTree.chain([3, 4, 5, 6], "x"), script, root=2)
    assert on_text == [2, 3, 4, None]
    assert rows == [1, 2, None, None]  # nothing is known after the last token


def test_recordings_of_same_texts_are_merged(target: NativeTarget, goose: Recording) -> None:
    both = recorded(target, [method_of("goose"), method_of("recycling")])
    assert len(both.requests) == len(goose.requests)
    assert both.num_rows > goose.num_rows
    assert both.num_left_out == 0
    for name in ("goose", "recycling"):
        figures = compute_figures(both, method_of(name), replay(both, method_of(name)))
        assert figures.tau == figures.recorded_tau
        assert figures.coverage == 1.0
    alone = compute_figures(goose, method_of("recycling"), replay(goose, method_of("recycling")))
    assert alone.recorded_tau is None
    assert alone.coverage is not None
    assert alone.coverage < 1.0


def test_run_with_other_texts_is_not_compared_with_replay(target: NativeTarget) -> None:
    first, second = method_of("recycling"), method_of("stand")
    both = recorded(target, [first, second], SAMPLED)
    assert [entry["left_out"] for entry in both.methods] == [0, both.num_left_out]
    assert both.num_left_out > 0  # drawn guesses give other texts of the same distribution
    assert compute_figures(both, first, replay(both, first)).recorded_tau is not None
    assert compute_figures(both, second, replay(both, second)).recorded_tau is None


def test_different_output_of_same_request_is_omitted() -> None:
    recording = hand_made_recording()
    other = hand_made_recording().requests[0]
    changed = RecordedRequest(**{**vars(other), "output_ids": (3, 4, 6)})
    recording.add(changed)
    assert (len(recording.requests), recording.num_left_out, recording.num_rows) == (1, 1, 6)


def test_recording_does_not_change_output(target: NativeTarget) -> None:
    """This includes drafters that do not read the prompt's logits."""
    for name in ("stand:harvest_prompt=false", "goose"):
        method = method_of(name)
        (entry,) = recorded(target, [method]).methods
        stats = run_without_recording(target, method, GREEDY)
        assert entry["cycles"] == sum(each.cycles for each in stats)
        assert entry["tokens"] == sum(each.output_tokens for each in stats)


def test_recording_drafter_works_in_an_llm(target: NativeTarget) -> None:
    recorder = Recorder(8)
    cls = make_recording_drafter(drafter_class("stand"), recorder)
    assert cls.name == "stand"
    with LLM.from_target(target, ByteTokenizer(), drafter=cls, drafter_options={"top_k": 5}, budget=8) as llm:
        completions = llm.generate("abc abc", SamplingParams(max_tokens=6, temperature=1.0, seed=1, n=2))
    requests = recorder.take(completions, "t", "p")
    assert [request.sample for request in requests] == [0, 1]
    assert [list(request.output_ids) for request in requests] == [c.token_ids for c in completions]
    assert requests[0].rows.find(ON_TEXT, 0) is not None  # the prompt was read once
    assert requests[1].rows.find(ON_TEXT, 0) is None
    assert recorder.take([], "t", "p") == []


def test_every_turn_of_a_conversation_is_a_request(target: NativeTarget) -> None:
    recording = recorded(target, [method_of("pld")], SamplingParams(max_tokens=6), ["ab ab"], turns=2)
    first, second = recording.requests
    assert (first.turn, second.turn) == (0, 1)
    assert len(second.prompt_ids) > len(first.text)
