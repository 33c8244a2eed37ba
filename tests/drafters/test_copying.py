"""Drafting from earlier answers to the same prompt: output stays exact, later answers take fewer passes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood import LLM, SamplingParams
from draftwood.drafters import DraftRequest, copying
from draftwood.drafters.copying import EarlierAnswers, text_with_earlier
from draftwood.errors import DraftwoodError, OptionError
from tests.tools.engine import PROMPTS, law_of_pairs, make_llm
from tests.tools.enumeration import assert_fits

DRAFTERS = ("pld", "anpd", "sam")
EARLIER = {"earlier_answers": True}


def copying_llm(drafter: str, options: dict[str, Any] = EARLIER, **more: object) -> LLM:
    return make_llm(drafter=drafter, drafter_options=options, **more)


def count_cycles(completions: list[Any]) -> int:
    return sum(c.stats.cycles for c in completions)


# -- through the engine ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_output_is_plain_decoding_and_is_copied_the_second_time(drafter: str) -> None:
    with copying_llm(drafter, memory="process") as llm:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        plain = [c.token_ids for c in llm.generate(PROMPTS, params, drafter="plain")]
        first, second = (llm.generate(PROMPTS, params) for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in second] == plain
    assert count_cycles(second) < 0.7 * count_cycles(first)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_sampled_tokens_have_the_target_distribution(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square test against all pairs of first tokens, over many samples that copy from each other."""
    monkeypatch.setattr(copying, "MAX_EARLIER_TOKENS", 256)
    with copying_llm(drafter, budget=24, max_batch=40) as llm:
        prompt = llm.tokenizer.encode("tot otott tootot to")
        expected = law_of_pairs(llm, prompt, temperature=1.5, top_k=6)
        params = SamplingParams(max_tokens=2, temperature=1.5, top_k=6, seed=1, n=1500, ignore_eos=True)
        samples = llm.generate([prompt], params)
    assert_fits(Counter(tuple(c.token_ids) for c in samples), expected)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_samples_copy_finished_samples_of_their_prompt(drafter: str) -> None:
    params = SamplingParams(max_tokens=40, temperature=0.2, seed=1, n=8, ignore_eos=True)
    with copying_llm(drafter, max_batch=1) as llm:
        samples = llm.generate("once upon", params)
        plain = llm.generate("once upon", params, drafter="plain")
    with copying_llm(drafter, {}, max_batch=1) as llm:
        alone = llm.generate("once upon", params)
    assert [c.token_ids for c in samples] == [c.token_ids for c in alone] == [c.token_ids for c in plain]
    assert samples[0].stats.cycles == alone[0].stats.cycles
    assert count_cycles(samples[4:]) < count_cycles(alone[4:])


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_other_prompts_and_default_options_have_no_earlier_answers(drafter: str) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with copying_llm(drafter) as llm:
        cycles = [llm.generate("once upon", params)[0].stats.cycles for _ in range(2)]
        assert cycles[0] == cycles[1]  # the scope is one prompt of one call
    with copying_llm(drafter, {}, memory="process") as llm:
        assert [llm.generate("once upon", params)[0].stats.cycles for _ in range(2)] == cycles
        assert llm.factory(drafter).new(0).memory is None


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_earlier_answers_are_kept_in_a_file(drafter: str, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    cycles = []
    for _ in range(2):
        with copying_llm(drafter, memory=str(tmp_path / "answers.memory")) as llm:
            cycles.append(llm.generate("once upon", params)[0].stats.cycles)
    assert cycles[1] < cycles[0]
    with pytest.raises(DraftwoodError, match="learns nothing"):
        copying_llm(drafter, {}, memory=str(tmp_path / "other.memory"))


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_option_is_a_flag(drafter: str) -> None:
    with pytest.raises(OptionError, match="earlier_answers"):
        copying_llm(drafter, {"earlier_answers": 2})


# -- the memory ------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), max_size=4),
)
def test_the_end_of_the_prompt_is_before_every_answer_and_last(prompt: list[int], answers: list[list[int]]) -> None:
    memory = EarlierAnswers(10)
    for answer in answers:
        memory.add(prompt, answer)
    known = list(text_with_earlier(DraftRequest(prompt, SamplingParams(), None), memory.texts))  # type: ignore[arg-type]
    tail = prompt[-16:]
    assert known == prompt + [token for answer in answers for token in [*tail, *answer]] + (tail if answers else [])


def test_the_oldest_answers_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "MAX_EARLIER_TOKENS", 10)
    memory = EarlierAnswers(100)
    memory.add([1], [])  # an answer that was cancelled before its first token
    assert not memory.texts
    for start in (0, 10, 20):
        memory.add([1], [start, start + 1, start + 2])
    assert list(memory.texts) == [[1, 10, 11, 12], [1, 20, 21, 22]]
    memory.add([1], list(range(30, 50)))
    assert list(memory.texts) == [list(range(40, 50))]


def test_restored_answers_are_those_saved_and_checked() -> None:
    memory, again = EarlierAnswers(100), EarlierAnswers(100)
    for answer in ([5, 6], [7]):
        memory.add([1, 2], answer)
    again.restore(memory.arrays())
    assert list(again.texts) == list(memory.texts) == [[1, 2, 5, 6], [1, 2, 7]]
    for tokens, lengths in (([100], [1]), ([-1], [1]), ([1, 2], [1])):
        with pytest.raises(ValueError, match="answers"):
            again.restore({"answers.tokens": np.array(tokens), "answers.lengths": np.array(lengths)})
