"""From a conversation to training texts: which tokens the target generated.

A chat template may change earlier turns, so nothing is assumed about it: rendered token ids are compared. If a prompt
starts with the whole text so far, the text continues. Otherwise (a template that removes reasoning from earlier
answers, or an answer that is tokenised differently when rendered again) a new text starts, in which only the new answer
counts. Either way every counted token follows exactly the tokens that the target saw when it generated it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from draftwood.errors import CapabilityError, PromptError
from draftwood.prompts import prompt_ids
from draftwood.text import Message, TextCodec
from draftwood.train.base import Example

# Texts without a common first character: their common prefix is what precedes any user turn.
_PROBES = ("Alpha", "zero", "7", "Übung", "(")


class Transcript:
    """The texts of one conversation so far."""

    def __init__(self) -> None:
        self._texts: list[tuple[list[int], list[bool]]] = []

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Add the next prompt (the whole conversation so far) and the target's answer."""
        ids, answered = self._find_text(prompt)
        new = prompt[len(ids) :]
        ids += [*new, *answer]
        answered += [False] * len(new) + [True] * len(answer)

    def examples(self) -> list[Example]:
        return [Example(np.array(ids, np.int32), np.array(answered, np.bool_)) for ids, answered in self._texts]

    def _find_text(self, prompt: Sequence[int]) -> tuple[list[int], list[bool]]:
        if not self._texts or list(prompt[: len(self._texts[-1][0])]) != self._texts[-1][0]:
            self._texts.append(([], []))
        return self._texts[-1]


def render_prompt(codec: TextCodec, messages: Sequence[Message], place: str) -> list[int]:
    """Render the conversation so far as a prompt. Errors name its ``place``."""
    with _name_place(place):
        return prompt_ids(codec, messages)


def split_answer(codec: TextCodec, messages: Sequence[Message], place: str) -> tuple[list[int], list[int]]:
    """Split a conversation that ends with an answer into prompt and answer.

    The answer starts where the rendering with it differs from the prompt, and ends with the last end-of-turn token, or
    at the end of the text if the template has none.
    """
    before = render_prompt(codec, messages[:-1], place)
    with _name_place(place):
        whole = (
            codec.apply_chat(messages, add_generation_prompt=False) if codec.has_chat else prompt_ids(codec, messages)
        )
    begin = _common_length(before, whole)
    ends = [index for index in range(begin, len(whole)) if whole[index] in codec.eos_token_ids]
    return whole[:begin], whole[begin : ends[-1] + 1 if ends else len(whole)]


def find_opening(codec: TextCodec) -> list[int]:
    """Return the tokens before the first user turn, from which the target can generate a prompt."""
    if not codec.has_chat:
        raise CapabilityError(
            "A model without a chat template cannot write its own prompts",
            next_step="Use files of prompts instead of --self.",
        )
    rendered = [codec.apply_chat([{"role": "user", "content": probe}]) for probe in _PROBES]
    common = rendered[0][: min(_common_length(rendered[0], other) for other in rendered[1:])]
    if not common:
        raise CapabilityError(
            "The chat template has nothing before a user's turn, so the model cannot generate prompts",
            next_step="Use files of prompts instead of --self.",
        )
    return common


def _common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@contextmanager
def _name_place(place: str) -> Iterator[None]:
    """Add the conversation's place to errors."""
    try:
        yield
    except PromptError as error:
        raise PromptError(
            f"{place}: {error.what}", got=error.got, allowed=error.allowed, next_step=error.next_step
        ) from error
