"""Adaptive n-grams: the most frequent next token after the last few tokens, counted in the prompt and the output.

On English and code, with n-grams up to 5, there are 1.5 contexts and 280 to 330 bytes per token. Most contexts occur
only once; these store their follower without counts.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Guess(NamedTuple):
    tokens: list[int]
    probs: list[float]  # of each token given those before it


class AdaptiveNgrams:
    """N-gram counts of one text; ``extend`` it with every committed token.

    ``max_order`` is the largest n: the next token is guessed from the last n-1 tokens, or from fewer if these are
    unknown. The most frequent follower wins; ties go to the latest.
    """

    def __init__(self, max_order: int) -> None:
        self._max_context = max_order - 1  # tokens
        self._tokens: list[int] = []
        # Context -> its followers, or its only follower if it occurred once.
        self._followers: dict[tuple[int, ...], _Followers | int] = {}

    @property
    def tokens(self) -> Sequence[int]:
        return self._tokens

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._count(token)
            self._tokens.append(token)

    def guess(self, max_tokens: int) -> Guess:
        """Guess token by token, each from those before it, until a context is unknown."""
        guess = Guess([], [])
        recent = self._tokens[-self._max_context :]
        while len(guess.tokens) < max_tokens:
            following = self._next(recent)
            if following is None:
                break
            token, prob = following
            guess.tokens.append(token)
            guess.probs.append(prob)
            recent = [*recent, token][-self._max_context :]
        return guess

    def _next(self, recent: Sequence[int]) -> tuple[int, float] | None:
        """Best follower of the longest known context, and its probability with one pseudo-count for unseen tokens."""
        for size in range(len(recent), 0, -1):
            known = self._followers.get(tuple(recent[-size:]))
            if isinstance(known, int):
                return known, 0.5
            if known is not None:
                return known.best, known.counts[known.best] / (known.total + 1)
        return None

    def _count(self, token: int) -> None:
        followers, recent = self._followers, self._tokens[-self._max_context :]
        for size in range(1, len(recent) + 1):
            context = tuple(recent[-size:])
            known = followers.get(context)
            if known is None:
                followers[context] = token
                continue
            if isinstance(known, int):
                known = followers[context] = _Followers(known)
            known.add(token)


class _Followers:
    """Follower counts of a context, with the most frequent one cached."""

    __slots__ = ("best", "counts", "total")

    def __init__(self, first: int) -> None:
        self.counts = {first: 1}
        self.total = 1
        self.best = first

    def add(self, token: int) -> None:
        count = self.counts.get(token, 0) + 1
        self.counts[token] = count
        self.total += 1
        if count >= self.counts[self.best]:
            self.best = token
