"""Context match: where the last tokens occurred before in the prompt or the output, and what followed there.

An index from every n-gram to the place behind its latest occurrence is kept up to date token by token, so that neither
an update nor a query depends on the length of the context.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Match(NamedTuple):
    tokens: list[int]  # what followed the earlier occurrence
    length: int  # tokens that matched


class ContextMatch:
    """Answers from its own history only; ``extend`` it with every committed token."""

    def __init__(self, ngram_sizes: Iterable[int]) -> None:
        self._sizes = sorted(set(ngram_sizes), reverse=True)  # longest first
        self._tokens: list[int] = []
        self._behind: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token behind its latest occurrence

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    def extend(self, tokens: Iterable[int]) -> None:
        history = self._tokens
        for token in tokens:
            # An n-gram is entered once its continuation is known, so the last tokens never match themselves.
            end = len(history)
            for size in self._sizes:
                if size <= end:
                    self._behind[tuple(history[end - size : end])] = end
            history.append(token)

    def match(self, max_tokens: int) -> Match | None:
        """The continuation of the longest suffix seen before, at its latest place."""
        history = self._tokens
        for size in self._sizes:
            if size > len(history):
                continue
            start = self._behind.get(tuple(history[-size:]))
            if start is not None:
                return Match(history[start : start + max_tokens], size)
        return None
