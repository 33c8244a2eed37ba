"""Context match: find an earlier occurrence of the last tokens in the prompt or output, and what followed it.

An index maps every n-gram to the position after its latest occurrence. It is updated token by token, so neither an
update nor a query depends on the length of the context. The same index exists in C (compiled/context.h).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, islice
from typing import NamedTuple

from draftwood.compiled import MAX_SIZES, CompiledContext, Core, load_core


class Match(NamedTuple):
    tokens: list[int]  # what followed the earlier occurrence
    length: int  # matched tokens
    num_agreeing: int = 1  # n-gram sizes whose latest occurrence continues with the same token, this one included
    num_places: int = 1  # distinct positions among those occurrences

    def trust(self) -> list[float]:
        """Probability of each token given those before it; it rises with the length of the match."""
        return [1.0 - 1.0 / (self.length + i + 1.5) for i in range(len(self.tokens))]


def new_context(ngram_sizes: Iterable[int], *, repeat: bool = False) -> ContextMatch | CompiledContextMatch:
    """An n-gram index of one text, in C if there is a compiler."""
    core, sizes = load_core(), set(ngram_sizes)
    if core is None or len(sizes) > MAX_SIZES:
        return ContextMatch(sizes, repeat=repeat)
    return CompiledContextMatch(core, sizes, repeat=repeat)


class CompiledContextMatch:
    """As ``ContextMatch``."""

    def __init__(self, core: Core, ngram_sizes: Iterable[int], *, repeat: bool = False) -> None:
        self.index = CompiledContext(core, sorted(ngram_sizes, reverse=True))
        self._repeat = repeat
        self.extend = self.index.extend

    @property
    def tokens(self) -> Sequence[int]:
        return self.index.tokens()

    @property
    def last(self) -> int:
        return self.index.last()

    def match(self, max_tokens: int) -> Match | None:
        found = self.index.match(max_tokens, repeat=self._repeat)
        return None if found is None else Match(*found)


class ContextMatch:
    """N-gram index of one text; ``extend`` it with every committed token."""

    def __init__(self, ngram_sizes: Iterable[int], *, repeat: bool = False) -> None:
        """``repeat``: a copy that reaches the end of the text starts over, for text that repeats itself."""
        self._repeat = repeat
        self._sizes = sorted(set(ngram_sizes), reverse=True)  # longest first
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # n-gram -> index of the token after its latest occurrence

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    @property
    def last(self) -> int:
        return self._tokens[-1]

    def extend(self, tokens: Iterable[int]) -> None:
        history = self._tokens
        for token in tokens:
            # An n-gram is indexed once its continuation is known, so the last tokens never match themselves.
            end = len(history)
            for size in self._sizes:
                if size <= end:
                    self._next[tuple(history[end - size : end])] = end
            history.append(token)

    def match(self, max_tokens: int) -> Match | None:
        """The continuation of the longest known suffix at its latest occurrence, and how many n-gram sizes agree."""
        history = self._tokens
        found = [(size, self._next.get(tuple(history[-size:]))) for size in self._sizes if size <= len(history)]
        starts = [(size, start) for size, start in found if start is not None]
        if not starts:
            return None
        length, start = starts[0]
        agreeing = [other for _, other in starts if history[other] == history[start]]
        tokens = history[start : start + max_tokens]
        if self._repeat and len(tokens) < max_tokens:
            tokens = list(islice(cycle(tokens), max_tokens))
        return Match(tokens, length, len(agreeing), len(set(agreeing)))
