"""One conversation with the target: what it is asked next, and what becomes of its answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftwood.config import SamplingParams
from draftwood.text import Message, TextCodec
from draftwood.train.data.prompts import Prompt
from draftwood.train.data.settings import DataSettings
from draftwood.train.data.transcript import Transcript, answer_of, asked

EMPTY, TOO_LONG, CUT = "empty", "too_long", "cut_short"  # what may be lost of a conversation


class Ask(NamedTuple):
    """A request to the target."""

    prompt_ids: Sequence[int]
    params: SamplingParams


class Rules(NamedTuple):
    """What all conversations of a run have in common."""

    settings: DataSettings
    codec: TextCodec
    max_length: int  # tokens of a text
    opening: Sequence[int] = ()  # what stands before a user's turn: self-made prompts go on from there


class Dialogue:
    """Every turn is answered and becomes part of what the next one is asked in.

    A first turn that leaves no room for an answer makes the conversation too long, a later one ends it there.
    ``lost`` says so, and the count is told in the end.
    """

    def __init__(self, index: int, prompt: Prompt, rules: Rules) -> None:
        self.index = index
        self.transcript = Transcript()
        self.lost: str | None = None
        self._place = prompt.place
        self._rules = rules
        self._ahead: deque[Message] = deque(prompt.messages)
        self._said: list[Message] = []
        self._asked: list[int] = []
        self._turn = 0

    def ask(self) -> Ask | None:
        """The next request; None when all is said."""
        while self._ahead:
            self._said.append(self._ahead.popleft())
            if self._said[-1]["role"] == "user":
                self._asked = asked(self._rules.codec, self._said, self._place)
                if self._has_room(self._asked):
                    room = self._rules.max_length - len(self._asked)
                    return Ask(self._asked, self._rules.settings.answering(self._next_seed(), room))
        return None

    @property
    def reads_text(self) -> bool:
        """Whether the text of the next answer is of use: something follows it."""
        return bool(self._ahead)

    def take(self, token_ids: Sequence[int], text: str) -> None:
        """The answer to the last request; its text may be missing where ``reads_text`` says so."""
        self.transcript.add(self._asked, token_ids)
        self._said.append({"role": "assistant", "content": text})

    def _has_room(self, prompt_ids: Sequence[int]) -> bool:
        if len(prompt_ids) < self._rules.max_length:
            return True
        self.lost = CUT if self.transcript.examples() else TOO_LONG
        self._ahead.clear()
        return False

    def _next_seed(self) -> int:
        """Of its own for every request: what others do makes no difference to it."""
        self._turn += 1
        sequence = np.random.SeedSequence(self._rules.settings.seed, spawn_key=(self.index, self._turn))
        return int(sequence.generate_state(1, np.uint64)[0])


class SelfMade(Dialogue):
    """The target writes what the user says, and then answers it."""

    def __init__(self, index: int, number: int, rules: Rules) -> None:
        super().__init__(index, Prompt(f"self-made prompt {number}", ()), rules)
        self._is_written = False

    def ask(self) -> Ask | None:
        if self._is_written:
            return super().ask()
        return Ask(self._rules.opening, self._rules.settings.asking(self._next_seed()))

    @property
    def reads_text(self) -> bool:
        return not self._is_written or super().reads_text

    def take(self, token_ids: Sequence[int], text: str) -> None:
        if self._is_written:
            super().take(token_ids, text)
            return
        self._is_written = True
        if text.strip():
            self._ahead.append({"role": "user", "content": text.strip()})
        else:
            self.lost = EMPTY


class Kept(Dialogue):
    """The answers are there already; nothing is asked."""

    def ask(self) -> Ask | None:
        while self._ahead:
            self._said.append(self._ahead.popleft())
            if self._said[-1]["role"] == "assistant":
                prompt_ids, answer = answer_of(self._rules.codec, self._said, self._place)
                if answer and self._has_room(prompt_ids):
                    self.transcript.add(prompt_ids, answer[: self._rules.max_length - len(prompt_ids)])
        return None
