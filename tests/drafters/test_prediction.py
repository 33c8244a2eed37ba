"""Predicted outputs: a prediction changes the drafts but never the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood import LLM, SamplingParams
from draftwood.drafters import DraftRequest
from draftwood.engine import GenerationRequest
from tests.tools.cli import SHORT, Command, _plain_environment, draftwood_command  # noqa: F401 - fixtures
from tests.tools.engine import CHOOSING, COPYING, DRAWING, STANDALONE, make_llm

PROMPT = "one two three"
LONG = SamplingParams(max_tokens=48, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm() as made:
        yield made


def request(prompt: list[int], prediction: list[int]) -> DraftRequest:
    return DraftRequest(prompt, LONG, None, prediction)  # type: ignore[arg-type]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40), st.lists(st.integers(0, 9), max_size=40))
def test_prediction_follows_the_end_of_the_prompt(prompt: list[int], prediction: list[int]) -> None:
    known = list(request(prompt, prediction).known_text)
    assert known[: len(prompt) + len(prediction)] == prompt + prediction
    assert prompt[-16:] == known[-16:][-len(prompt) :]
    if not prediction:
        assert known == prompt


@pytest.mark.parametrize("drafter", [*CHOOSING, *DRAWING])
@settings(max_examples=10, deadline=None)
@given(prediction=st.text(max_size=30), temperature=st.sampled_from([0.0, 0.7]))
def test_prediction_does_not_change_the_text(llm: LLM, drafter: str, prediction: str, temperature: float) -> None:
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3)
    plain = llm.generate(PROMPT, params, drafter="plain")[0]
    if temperature and drafter in DRAWING:
        return  # drawn drafts are exact in distribution
    assert llm.generate(PROMPT, params, drafter=drafter, prediction=prediction)[0].token_ids == plain.token_ids


@pytest.mark.parametrize("drafter", COPYING)
def test_correct_prediction_is_copied_from_first_token(llm: LLM, drafter: str) -> None:
    plain = llm.generate(PROMPT, LONG, drafter="plain")[0]
    without = llm.generate(PROMPT, LONG, drafter=drafter)[0]
    prompt_ids = llm.tokenizer.encode(PROMPT)
    engine = llm.engine
    # By ids: the bytes that this model generates are not valid text.
    (own,) = engine.submit(
        GenerationRequest(
            prompt_ids=tuple(prompt_ids), params=LONG, drafter=llm.factory(drafter), prediction=tuple(plain.token_ids)
        )
    )
    events = list(engine.events([own]))
    tokens = [token for event in events for token in event.token_ids]
    assert tokens == plain.token_ids == without.token_ids
    assert events[-1].stats.cycles < without.stats.cycles
    assert len(events[0].token_ids) > 1


@pytest.mark.parametrize("drafter", STANDALONE)
def test_only_drafters_that_copy_text_use_the_prediction(
    llm: LLM, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[DraftRequest] = []
    monkeypatch.setattr(DraftRequest, "known_text", property(lambda self: reads.append(self) or self.prompt_ids))
    llm.generate(PROMPT, SamplingParams(max_tokens=1), drafter=drafter)
    assert bool(reads) == STANDALONE[drafter].copies_text


def test_streams_and_chats_accept_predictions(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    plain = llm.chat(messages, LONG)[0]
    assert llm.chat(messages, LONG, drafter="pld", prediction="abc")[0].token_ids == plain.token_ids
    for events in (
        llm.stream(PROMPT, LONG, drafter="pld", prediction="abc"),
        llm.stream_chat(messages, LONG, drafter="pld", prediction="abc"),
    ):
        assert sum(len(event.token_ids) for event in events) == 48


def test_prediction_from_command_line(draftwood_command: Command, tmp_path: Path) -> None:
    expected = tmp_path / "expected.txt"
    expected.write_text("abc")
    plain, predicted, compared = (
        draftwood_command("generate", PROMPT, *SHORT, "--drafter", "pld", "--json", *more)
        for more in ((), ("--prediction", str(expected)), ("--prediction", str(expected), "--compare"))
    )
    texts = [json.loads(result.out)["text"] for result in (plain, predicted, compared)]
    assert len(set(texts)) == 1
    assert json.loads(compared.out)["compare"]
    missing = draftwood_command("generate", PROMPT, *SHORT, "--prediction", "nowhere.txt")
    assert missing.code == 2
    assert "nowhere.txt" in missing.err
