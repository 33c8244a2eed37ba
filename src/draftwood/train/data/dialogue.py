"""A conversation with the target: the next request, and the texts made from the answers."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from draftwood.config import SamplingParams
from draftwood.text import Message, TextCodec
from draftwood.train.data.prompts import Prompt
from draftwood.train.data.transcript import Transcript, render_prompt, split_answer
from draftwood.train.data_settings import DataSettings

EMPTY, TOO_LONG, CUT = "empty", "too_long", "cut_short"  # reasons why all or part of a conversation is lost


class Ask(NamedTuple):
    """A request to the target."""

    prompt_ids: Sequence[int]
    params: SamplingParams


class Rules(NamedTuple):
    """Settings shared by all conversations of a run."""

    settings: DataSettings
    codec: TextCodec
    max_length: int  # maximum tokens of a text
    opening: Sequence[int] = ()  # tokens before a user turn, from which the target generates prompts


class Dialogue:
    """Answers every turn in the context of the earlier ones.

    If the first turn leaves no room for an answer, the conversation is dropped; if a later one does, it ends there.
    ``lost`` is the reason, which is counted and reported.
    """

    def __init__(self, index: int, prompt: Prompt, rules: Rules) -> None:
        self.index = index
        self.transcript = Transcript()
        self.lost: str | None = None
        self._place = prompt.place
        self._rules = rules
        self._remaining: deque[Message] = deque(prompt.messages)
        self._messages: list[Message] = []
        self._prompt_ids: list[int] = []
        self._turn = 0

    def ask(self) -> Ask | None:
        """Return the next request, or None at the end of the conversation."""
        while self._remaining:
            self._messages.append(self._remaining.popleft())
            if self._messages[-1]["role"] == "user":
                self._prompt_ids = render_prompt(self._rules.codec, self._messages, self._place)
                if self._has_room(self._prompt_ids):
                    room = self._rules.max_length - len(self._prompt_ids)
                    return Ask(self._prompt_ids, self._rules.settings.answering(self._next_seed(), room))
        return None

    @property
    def reads_text(self) -> bool:
        """Whether the text of the next answer is needed, because another turn follows."""
        return bool(self._remaining)

    def take(self, token_ids: Sequence[int], text: str) -> None:
        """Add the answer to the last request. Its text is needed only if ``reads_text``."""
        self.transcript.add(self._prompt_ids, token_ids)
        self._messages.append({"role": "assistant", "content": text})

    def _has_room(self, prompt_ids: Sequence[int]) -> bool:
        if len(prompt_ids) < self._rules.max_length:
            return True
        self.lost = CUT if self.transcript.examples() else TOO_LONG
        self._remaining.clear()
        return False

    def _next_seed(self) -> int:
        """Return a seed that depends only on the conversation and the turn."""
        self._turn += 1
        sequence = np.random.SeedSequence(self._rules.settings.seed, spawn_key=(self.index, self._turn))
        return int(sequence.generate_state(1, np.uint64)[0])


class SelfMade(Dialogue):
    """The target generates the user's turn, then answers it."""

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
            self._remaining.append({"role": "user", "content": text.strip()})
        else:
            self.lost = EMPTY


class Kept(Dialogue):
    """Keeps the answers of the file; the target is not run."""

    def ask(self) -> Ask | None:
        while self._remaining:
            self._messages.append(self._remaining.popleft())
            if self._messages[-1]["role"] == "assistant":
                prompt_ids, answer = split_answer(self._rules.codec, self._messages, self._place)
                if answer and self._has_room(prompt_ids):
                    self.transcript.add(prompt_ids, answer[: self._rules.max_length - len(prompt_ids)])
        return None
