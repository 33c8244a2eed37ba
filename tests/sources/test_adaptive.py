"""Adaptive n-grams against counts over the whole text."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.sources.adaptive import AdaptiveNgrams, Guess

texts = st.lists(st.integers(0, 2), max_size=60)


def counted(text: list[int], context: list[int]) -> Counter[int]:
    """The followers of a context in the text, latest last."""
    size = len(context)
    followers = Counter[int]()
    for end in range(size, len(text)):
        if text[end - size : end] == context:
            count = followers.pop(text[end], 0)
            followers[text[end]] = count + 1
    return followers


def recounted(text: list[int], max_order: int, max_tokens: int) -> Guess:
    tokens: list[int] = []
    probs: list[float] = []
    while len(tokens) < max_tokens:
        before = [*text, *tokens]
        for size in range(min(max_order - 1, len(before)), 0, -1):
            followers = counted(text, before[-size:])
            if followers:
                break
        else:
            break
        most = max(followers.values())
        tokens.append([token for token, count in followers.items() if count == most][-1])
        probs.append(most / (sum(followers.values()) + 1))
    return Guess(tokens, probs)


@given(texts, st.integers(2, 6), st.integers(0, 10))
def test_guess_equals_a_new_count_after_every_token(text: list[int], max_order: int, max_tokens: int) -> None:
    ngrams = AdaptiveNgrams(max_order)
    assert ngrams.guess(max_tokens) == Guess([], [])
    for end, token in enumerate(text, 1):
        ngrams.extend([token])
        assert ngrams.guess(max_tokens) == recounted(text[:end], max_order, max_tokens)


def test_most_frequent_follower_wins_with_ties_to_latest() -> None:
    ngrams = AdaptiveNgrams(2)
    ngrams.extend([1, 2, 1, 3, 1])
    assert ngrams.guess(1) == Guess([3], [1 / 3])
    ngrams.extend([2, 1])
    assert ngrams.guess(1) == Guess([2], [2 / 4])
    ngrams.extend([3, 1])
    assert ngrams.guess(1) == Guess([3], [2 / 5])


def test_longer_contexts_come_before_frequent_ones() -> None:
    ngrams = AdaptiveNgrams(3)
    ngrams.extend([7, 1, 2, 0, 1, 3, 0, 1, 3, 0, 7, 1])
    assert ngrams.guess(1).tokens == [2]
    ngrams.extend([9, 8, 1])  # never seen after 8
    assert ngrams.guess(1).tokens == [3]


def test_guessing_stops_at_the_first_unknown_context() -> None:
    ngrams = AdaptiveNgrams(5)
    ngrams.extend([1, 2, 3, 4])
    assert ngrams.guess(8) == Guess([], [])
    ngrams.extend([2])
    assert ngrams.guess(8).tokens == [3, 4, 2, 3, 4, 2, 3, 4]


@pytest.mark.parametrize("max_order", [2, 5])
def test_contexts_per_token_are_bounded(max_order: int) -> None:
    for text in ([0] * 2000, list(range(2000)), [i * i % 97 for i in range(2000)]):
        ngrams = AdaptiveNgrams(max_order)
        ngrams.extend(text)
        assert len(ngrams._followers) <= (max_order - 1) * len(text)
