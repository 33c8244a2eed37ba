"""Context match: where the last tokens occurred before in the prompt or the output, and what followed there.

An index from every n-gram to the place behind its latest occurrence is kept up to date token by token, so that neither
an update nor a query depends on the length of the context.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from typing import NamedTuple


class Match(NamedTuple):
    tokens: list[int]  # what followed the earlier occurrence
    length: int  # tokens that matched
    num_agreeing: int = 1  # sizes of n-grams whose latest occurrence goes on with the same token, this one included
    num_places: int = 1  # different places among those occurrences

    def trust(self) -> list[float]:
        """How likely each token is right if those before it are: a longer match is a better one, and it grows."""
        return [1.0 - 1.0 / (self.length + i + 1.5) for i in range(len(self.tokens))]


class ContextMatch:
    """Answers from its own history only; ``extend`` it with every committed token."""

    def __init__(self, ngram_sizes: Iterable[int], *, repeat: bool = False) -> None:
        """``repeat``: where a copy reaches the end of the text, it goes on with itself, as text in a loop does."""
        self._repeat = repeat
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
        """The continuation of the longest suffix seen before, at its latest place; and who else says so."""
        history = self._tokens
        found = [(size, self._behind.get(tuple(history[-size:]))) for size in self._sizes if size <= len(history)]
        starts = [(size, start) for size, start in found if start is not None]
        if not starts:
            return None
        length, start = starts[0]
        agreeing = [other for _, other in starts if history[other] == history[start]]
        tokens = history[start : start + max_tokens]
        if self._repeat and len(tokens) < max_tokens:
            tokens = list(islice(cycle(tokens), max_tokens))
        return Match(tokens, length, len(agreeing), len(set(agreeing)))
