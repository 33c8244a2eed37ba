"""Conversations for training data: which tokens count, the prompt of every turn, synthetic prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import CapabilityError, PromptError
from draftwood.models.find import resolve
from draftwood.text.bytes import EOS, ByteTokenizer
from draftwood.text.chat import Message
from draftwood.text.tokenizer import TextCodec, Tokenizer
from draftwood.train.data.dialogue import Ask, Dialogue, Kept, Rules, SelfMade
from draftwood.train.data.prompts import Prompt
from draftwood.train.data.transcript import Transcript, find_opening, split_answer
from draftwood.train.data_settings import DataSettings
from tests.tools.train_data import (
    BARE,
    CHAT,
    END,
    FORGETFUL,
    HAS_SMOLLM2,
    PREAMBLE,
    assistant,
    rules_of,
    template_codec,
    user,
)

# -- which tokens count ----------------------------------------------------------------------------------------------


def smollm2_codec() -> Tokenizer:
    return Tokenizer.from_folder(resolve("smollm2").path)


CODECS: list[Any] = [
    pytest.param(ByteTokenizer, "\n", id="tiny"),
    pytest.param(lambda: template_codec(PREAMBLE), END, id="preamble"),
    pytest.param(lambda: template_codec(BARE), "\n", id="bare"),
    pytest.param(
        smollm2_codec,
        "<|im_end|>",
        id="smollm2",
        marks=pytest.mark.skipif(not HAS_SMOLLM2, reason="the default model is not in the cache"),
    ),
]


def kept_texts(
    codec: TextCodec, messages: tuple[Message, ...], max_length: int = 10_000
) -> list[list[tuple[int, bool]]]:
    rules = Rules(DataSettings(files=("a",)), codec, max_length)
    dialogue = Kept(0, Prompt("here", messages), rules)
    assert dialogue.ask() is None
    return [list(zip(ids.tolist(), mask.tolist(), strict=True)) for ids, mask in dialogue.transcript.examples()]


@pytest.mark.parametrize(("new_codec", "end"), CODECS)
def test_only_answers_and_their_end_tokens_count(new_codec: Callable[[], TextCodec], end: str) -> None:
    codec = new_codec()
    (text,) = kept_texts(codec, CHAT)
    ids = [token for token, _ in text]
    counting = [token for token, counts in text if counts]
    assert codec.decode(counting, skip_special=False) == f"Fine. And you?{end}Good!{end}"
    whole = codec.apply_chat(CHAT, add_generation_prompt=False)
    assert ids == whole[: len(ids)]
    assert codec.decode(whole[len(ids) :], skip_special=False).strip() == ""  # at most a line break after the end
    assert text[-1][1]


@pytest.mark.parametrize(("new_codec", "end"), CODECS)
def test_answer_follows_its_prompt(new_codec: Callable[[], TextCodec], end: str) -> None:
    codec = new_codec()
    for size in (2, 4):
        prompt, answer = split_answer(codec, CHAT[:size], "here")
        assert prompt == codec.apply_chat(CHAT[: size - 1])
        assert codec.decode(answer, skip_special=False) == CHAT[size - 1]["content"] + end


def test_template_that_drops_history_gives_one_text_per_answer() -> None:
    codec = template_codec(FORGETFUL)
    chat = (user("Hm?"), assistant("<t>long</t>yes"), user("Ok."), assistant("<t></t>no"))
    texts = kept_texts(codec, chat)
    said = [codec.decode([token for token, counts in text if counts], skip_special=False) for text in texts]
    assert said == [f"<t>long</t>yes{END}", f"<t></t>no{END}"]
    assert "long" not in codec.decode([token for token, _ in texts[1]])
    plain = (user("Hm?"), assistant("yes"), user("Ok."), assistant("no"))
    assert len(kept_texts(codec, plain)) == 1  # nothing to drop


def test_kept_answers_are_cut_to_the_length() -> None:
    codec = template_codec(PREAMBLE)
    prompt, answer = split_answer(codec, CHAT[:2], "here")
    (text,) = kept_texts(codec, CHAT, len(prompt) + 3)
    assert text == [*((token, False) for token in prompt), *((token, True) for token in answer[:3])]
    assert kept_texts(codec, CHAT, len(prompt)) == []


def test_template_error_names_the_conversation() -> None:
    codec = template_codec("{{ raise_exception('no system here') if messages[0]['role'] == 'system' }}x")
    dialogue = Dialogue(0, Prompt("a.jsonl, line 3", ({"role": "system", "content": "s"}, user("u"))), rules_of(codec))
    with pytest.raises(PromptError, match=r"a\.jsonl, line 3: .*rejects") as refusal:
        dialogue.ask()
    assert "no system here" in str(refusal.value)


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(st.lists(st.tuples(TOKENS, TOKENS, st.booleans()), min_size=1, max_size=6))
def test_counted_tokens_follow_the_context_of_the_target(turns: list[tuple[list[int], list[int], bool]]) -> None:
    """For any template: prompts that continue, and prompts that start again."""
    transcript = Transcript()
    said: list[int] = []
    expected = []
    for new, answer, needs_trained_head in turns:
        prompt = [*said, *new] if needs_trained_head else new
        transcript.add(prompt, answer)
        expected += [([*prompt, *answer[:place]], token) for place, token in enumerate(answer)]
        said = [*prompt, *answer]
    found = [
        (ids[:place].tolist(), int(ids[place]))
        for ids, answered in transcript.examples()
        for place in np.flatnonzero(answered)
    ]
    assert found == expected
    if all(needs_trained_head for *_, needs_trained_head in turns):
        assert len(transcript.examples()) == 1


# -- conversations ---------------------------------------------------------------------------------------------------


def next_ask(dialogue: Dialogue) -> Ask:
    ask = dialogue.ask()
    assert ask is not None
    return ask


def test_every_turn_is_prompted_with_the_history() -> None:
    codec = template_codec(PREAMBLE)
    dialogue = Dialogue(3, Prompt("here", (user("Hi."), user("Bye."))), rules_of(codec, temperature=1.0))
    first = next_ask(dialogue)
    assert first.prompt_ids == codec.apply_chat([user("Hi.")])
    answer = [*codec.encode("Oh"), EOS]
    dialogue.take(answer, "Oh")
    second = next_ask(dialogue)
    assert second.prompt_ids == codec.apply_chat([user("Hi."), assistant("Oh"), user("Bye.")])
    dialogue.take([65], "A")  # cut at the limit: no end token was generated, so none counts
    assert dialogue.ask() is None
    ((ids, answered),) = dialogue.transcript.examples()
    assert ids.tolist() == [*second.prompt_ids, 65]
    assert ids[answered].tolist() == [*answer, 65]
    seeds = [ask.params.seed for ask in (first, second)]
    other = next_ask(Dialogue(4, Prompt("here", (user("Hi."),)), rules_of(codec, temperature=1.0)))
    assert len({*seeds, other.params.seed}) == 3
    again = next_ask(Dialogue(3, Prompt("elsewhere", (user("Ho."),)), rules_of(codec, temperature=1.0)))
    assert again.params.seed == seeds[0]


def test_texts_do_not_exceed_max_length() -> None:
    codec = template_codec(PREAMBLE)
    size = len(codec.apply_chat([user("Hi.")]))
    messages = (user("Hi."), user("x" * 50))
    too_long = Dialogue(0, Prompt("here", messages), rules_of(codec, size))
    assert (too_long.ask(), too_long.lost, too_long.transcript.examples()) == (None, "too_long", [])
    cut = Dialogue(0, Prompt("here", messages), rules_of(codec, size + 9, max_tokens=40))
    assert next_ask(cut).params.max_tokens == 9
    cut.take([65] * 9, "A" * 9)
    assert (cut.ask(), cut.lost, len(cut.transcript.examples())) == (None, "cut_short", 1)


@pytest.mark.parametrize(("new_codec", "end"), CODECS)
def test_opening_is_the_template_before_a_user_turn(new_codec: Callable[[], TextCodec], end: str) -> None:
    codec = new_codec()
    before = codec.decode(find_opening(codec), skip_special=False)
    whole = codec.decode(codec.apply_chat([user("Why?")]), skip_special=False)
    assert whole.startswith(f"{before}Why?")


def test_synthetic_prompts_need_an_opening() -> None:
    with pytest.raises(CapabilityError, match="nothing before a user's turn"):
        find_opening(template_codec("{{ messages[0]['content'] }}"))
    codec = template_codec(PREAMBLE)
    codec.chat_template = None
    with pytest.raises(CapabilityError, match="without a chat template"):
        find_opening(codec)


def test_synthetic_prompts_are_sampled_and_answered() -> None:
    codec = template_codec(PREAMBLE)
    rules = rules_of(codec, self_made=2, prompt_temperature=0.7, prompt_tokens=5)
    dialogue = SelfMade(0, 0, rules)
    ask = next_ask(dialogue)
    assert ask.prompt_ids == rules.opening
    assert (ask.params.temperature, ask.params.max_tokens) == (0.7, 5)
    dialogue.take([*codec.encode(" Why? "), EOS], " Why? ")
    ask = next_ask(dialogue)
    assert ask.prompt_ids == codec.apply_chat([user("Why?")])
    assert ask.params.is_greedy
    dialogue.take([65, EOS], "A")
    assert dialogue.ask() is None
    ((ids, answered),) = dialogue.transcript.examples()
    assert ids[answered].tolist() == [65, EOS]
    silent = SelfMade(1, 1, rules)
    assert next_ask(silent).params.seed != ask.params.seed
    silent.take([EOS], " ")
    assert (silent.ask(), silent.lost) == (None, "empty")
