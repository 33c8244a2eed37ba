"""From a conversation to texts to learn from: which tokens of it the target wrote.

A chat template decides what a conversation looks like in tokens, and it may do what it likes with earlier turns. So
nothing about it is assumed; renderings are compared, token id by token id. A prompt that begins with everything there
is so far goes on with the same text. Where it does not (a template that leaves thoughts out of earlier answers, an
answer that would be split into other tokens when read again), a new text begins, in which only the new answer counts.
Either way every token that counts stands behind exactly those tokens that the target saw when it wrote it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from draftwood.errors import CapabilityError, PromptError
from draftwood.prompts import prompt_ids
from draftwood.text import Message, TextCodec
from draftwood.train.base import Example

# Beginnings that have no letter in common: what stands before all of them is what stands before any user's turn.
_PROBES = ("Alpha", "zero", "7", "Übung", "(")


class Transcript:
    """Texts of one conversation while it is had."""

    def __init__(self) -> None:
        self._texts: list[tuple[list[int], list[bool]]] = []

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """The next prompt, from the beginning of the conversation, and what the target answered to it."""
        ids, answered = self._text_before(prompt)
        new = prompt[len(ids) :]
        ids += [*new, *answer]
        answered += [False] * len(new) + [True] * len(answer)

    def examples(self) -> list[Example]:
        return [Example(np.array(ids, np.int32), np.array(answered, np.bool_)) for ids, answered in self._texts]

    def _text_before(self, prompt: Sequence[int]) -> tuple[list[int], list[bool]]:
        if not self._texts or list(prompt[: len(self._texts[-1][0])]) != self._texts[-1][0]:
            self._texts.append(([], []))
        return self._texts[-1]


def asked(codec: TextCodec, messages: Sequence[Message], place: str) -> list[int]:
    """The conversation so far, ready for the target's answer; errors name its ``place``."""
    with _placed(place):
        return prompt_ids(codec, messages)


def answer_of(codec: TextCodec, messages: Sequence[Message], place: str) -> tuple[list[int], list[int]]:
    """Prompt and answer where the last message is an answer that is there already.

    The rendering with the answer is compared with the one that asks for it: the answer begins where they part, and ends
    with the last end-of-turn token. A template without one has its own way to end a turn, which counts as a whole.
    """
    before = asked(codec, messages[:-1], place)
    with _placed(place):
        whole = (
            codec.apply_chat(messages, add_generation_prompt=False) if codec.has_chat else prompt_ids(codec, messages)
        )
    begin = _common(before, whole)
    ends = [index for index in range(begin, len(whole)) if whole[index] in codec.eos_token_ids]
    return whole[:begin], whole[begin : ends[-1] + 1 if ends else len(whole)]


def empty_user_turn(codec: TextCodec) -> list[int]:
    """What stands before whatever a user says first: a target that goes on from there writes a prompt."""
    if not codec.has_chat:
        raise CapabilityError(
            "A model without a chat template cannot write its own prompts",
            next_step="Name files of prompts instead of --self.",
        )
    rendered = [codec.apply_chat([{"role": "user", "content": probe}]) for probe in _PROBES]
    common = rendered[0][: min(_common(rendered[0], other) for other in rendered[1:])]
    if not common:
        raise CapabilityError(
            "The chat template has nothing before a user's turn, so the model cannot know that it should write one",
            next_step="Name files of prompts instead of --self.",
        )
    return common


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@contextmanager
def _placed(place: str) -> Iterator[None]:
    """Says in an error which conversation it is about."""
    try:
        yield
    except PromptError as error:
        raise PromptError(
            f"{place}: {error.what}", got=error.got, allowed=error.allowed, next_step=error.next_step
        ) from error
