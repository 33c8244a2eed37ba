"""Base class of drafters that know only texts: the prompt, the answer so far, and optionally earlier answers."""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from draftwood.drafters.base import PREDICTION_TAIL, Drafter, DraftRequest, VerifiedTree
from draftwood.targets import TargetInfo

MAX_EARLIER_TOKENS = 16_384  # of earlier answers; every new request indexes them


class TextIndex(Protocol):
    """An index of one text that grows at its end."""

    @property
    def tokens(self) -> Sequence[int]: ...

    def extend(self, tokens: Sequence[int]) -> object: ...


class EarlierAnswers:
    """The last answers, each after the end of its prompt."""

    layout = "texts of earlier answers"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._texts: deque[Sequence[int]] = deque()  # oldest first
        self._size = 0

    @property
    def texts(self) -> Sequence[Sequence[int]]:
        return self._texts

    def add(self, prompt_ids: Sequence[int], answer: Sequence[int]) -> None:
        """Keep an answer. The oldest ones are dropped; of an answer that is too long the end is kept."""
        if not answer:
            return
        text = [*prompt_ids[-PREDICTION_TAIL:], *answer][-MAX_EARLIER_TOKENS:]
        self._texts.append(text)
        self._size += len(text)
        while self._size > MAX_EARLIER_TOKENS:
            self._size -= len(self._texts.popleft())

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        return {
            "answers.tokens": np.array([*chain.from_iterable(self._texts)], dtype=np.int32),
            "answers.lengths": np.array([len(text) for text in self._texts], dtype=np.int64),
        }

    def restore(self, arrays: Mapping[str, npt.NDArray[np.generic]]) -> None:
        tokens, lengths = arrays["answers.tokens"].tolist(), arrays["answers.lengths"].tolist()
        if not all(0 <= token < self._vocab_size for token in tokens) or sum(lengths) != len(tokens):
            raise ValueError("answers.tokens contains tokens that the model does not have, or too few")
        for end, length in zip(accumulate(lengths), lengths, strict=True):
            self.add((), tokens[end - length : end])


class CopyingDrafter(Drafter):
    """Keeps an index of the text; subclasses create it and implement ``propose``."""

    copies_text = True
    wants_logits = False
    can_rest = True
    memory: EarlierAnswers | None

    @classmethod
    def new_memory(cls, options: Any, target: TargetInfo, shared: Any) -> EarlierAnswers | None:
        return EarlierAnswers(target.vocab_size) if options.earlier_answers else None

    @abstractmethod
    def new_index(self) -> TextIndex: ...

    def begin(self, request: DraftRequest) -> None:
        known = text_with_earlier(request, self.memory.texts if self.memory is not None else ())
        self._prompt_ids, self._num_known = request.prompt_ids, len(known)
        self._index = self.new_index()
        self._index.extend(known)

    def observe(self, verified: VerifiedTree) -> None:
        self._index.extend(verified.emitted)

    def skip(self, token_ids: Sequence[int]) -> None:
        self._index.extend(token_ids)

    def end(self) -> None:
        if self.memory is not None:
            self.memory.add(self._prompt_ids, self._index.tokens[self._num_known :])


def text_with_earlier(request: DraftRequest, earlier: Iterable[Sequence[int]]) -> Sequence[int]:
    """The text that the request knows, then earlier answers, then the end of the prompt again: so the first lookup
    matches the start of the last answer, and later ones find answers before the prompt."""
    texts = [*chain.from_iterable(earlier)]
    if not texts:
        return request.known_text
    return [*request.known_text, *texts, *request.prompt_ids[-PREDICTION_TAIL:]]
