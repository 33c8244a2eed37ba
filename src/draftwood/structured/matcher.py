"""Where an output stands in its structure: which tokens may follow, which text must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from draftwood.errors import CapabilityError, OptionError

CACHED_SPANS = 1024  # forced texts whose tokens are kept, per structure
MAX_SPAN = 32  # tokens of a forced text
CLOSERS = (b'"', b",", b"}", b"]")  # what ends a value of JSON
MAX_MESSAGE = 300  # characters of an error of the library


class Structure:
    """A compiled structure; every output gets a matcher of its own from it."""

    def __init__(self, matcher: Any, vocab_size: int, encode: Callable[[bytes], Sequence[int]]) -> None:
        """``encode``: the tokens of a text that may end within a character."""
        self._matcher, self._vocab_size = matcher, vocab_size
        self._encode = lru_cache(CACHED_SPANS)(lambda text: tuple(encode(text))[:MAX_SPAN])

    def start(self) -> StructureMatcher:
        return StructureMatcher(self._matcher.deep_copy(), self._vocab_size, self._encode)

    def check(self) -> None:
        """Raises an error if no output can match, or if a matcher cannot go back, as trees need."""
        first = self.start()
        some = torch.nonzero(first.allowed())[-1:, 0].tolist()
        if first.take(some) and not first.go_back(len(some)):
            raise OptionError(
                "The grammar cannot be used",
                got="max_tokens= or stop= in a rule",
                next_step="Use suffix= or lazy instead, and max_tokens of the request.",
                param="structured",
            )


class StructureMatcher:
    """The state of one output. ``take`` and ``go_back`` move along the branches of a tree."""

    def __init__(self, matcher: Any, vocab_size: int, encode: Callable[[bytes], Sequence[int]]) -> None:
        self._matcher, self._vocab_size, self._encode = matcher, vocab_size, encode

    @property
    def is_complete(self) -> bool:
        """Whether the output matches and nothing can follow."""
        return bool(self._matcher.is_stopped())

    def allows(self, token: int) -> bool:
        return bool(self._matcher.validate_tokens([token]))

    def take(self, tokens: Sequence[int]) -> int:
        """Goes on along the tokens, up to the first that is not allowed; returns how many were."""
        return int(self._matcher.try_consume_tokens(list(tokens)))

    def take_output(self, tokens: Sequence[int]) -> int:
        """Goes on along allowed tokens, up to the one that completes the output; returns how many that are."""
        for count, token in enumerate(tokens, start=1):
            self.take([token])
            if self.is_complete:
                return count
        return len(tokens)

    def go_back(self, count: int) -> bool:
        """Takes back the last ``count`` tokens; False if this kind of grammar cannot."""
        return count == 0 or bool(self._matcher.rollback(count))

    def allowed(self) -> torch.Tensor:
        """Which tokens may follow: [V], bool. Raises an error if none may."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if self._matcher.is_error() or not mask.any():
            raise CapabilityError(
                "The output cannot go on within its structure",
                got=(self._matcher.get_error() or "no token of the model may follow")[:MAX_MESSAGE],
                next_step="Simplify the schema or grammar: its next step is too complex, or needs other tokens.",
                param="structured",
            )
        return torch.from_numpy(mask)

    def forced(self) -> Sequence[int]:
        """Tokens of the text that must follow, as the tokenizer writes it; empty where there is a choice.

        A text can be written in other tokens too, and its last token can be longer in the end: they are guesses.
        """
        text = self._forced_text()
        return self._encode(text) if text else ()

    def closing(self) -> Sequence[int]:
        """Tokens that would end the current value of JSON, with the text that is forced after it; empty if it cannot
        end here, or if nothing is forced then."""
        for mark in CLOSERS:
            tokens = self._encode(mark)
            taken = self.take(tokens)
            text = self._forced_text() if taken == len(tokens) else b""
            self.go_back(taken)
            if text:
                return self._encode(mark + text)
        return ()

    def _forced_text(self) -> bytes:
        return bytes(self._matcher.compute_ff_bytes())
