"""The suffix automaton against plain scans of the text, and corpus files."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import DraftwoodError, OptionError
from draftwood.sources import suffix
from draftwood.sources.context import Match
from draftwood.sources.suffix import (
    MAX_REFRESHED,
    SEPARATOR,
    CorpusAutomaton,
    SuffixAutomaton,
    SuffixSource,
    load_corpus,
)

letters = st.integers(0, 2)
# A text has no more links than tokens, so in these every position is the latest one.
short_texts = st.lists(letters, max_size=MAX_REFRESHED)
long_texts = st.lists(letters, max_size=150)
documents = st.lists(st.lists(letters, max_size=12), min_size=1, max_size=5)


def places(text: Sequence[int], length: int) -> list[int]:
    """Earlier positions where the last ``length`` tokens end."""
    return [end for end in range(length, len(text)) if text[end - length : end] == text[len(text) - length :]]


def longest(text: Sequence[int]) -> int:
    return max((length for length in range(1, len(text)) if places(text, length)), default=0)


def scan(text: list[int], max_tokens: int) -> Match | None:
    length = longest(text)
    if length == 0:
        return None
    start = places(text, length)[-1]
    goes_on = length >= len(text) - start
    copied = list(text)
    for place in range(start, start + max_tokens if goes_on else min(start + max_tokens, len(text))):
        copied.append(copied[place])
    return Match(copied[len(text) :], length)


def scan_corpus(text: list[int], docs: list[list[int]], max_tokens: int) -> Match | None:
    for length in range(len(text), 0, -1):
        found = [
            (number, end)
            for number, doc in enumerate(docs)
            for end in range(length, len(doc))
            if doc[end - length : end] == text[len(text) - length :]
        ]
        if found:
            return Match(most_frequent(docs, found, max_tokens), length)
    return None


def most_frequent(docs: list[list[int]], found: list[tuple[int, int]], max_tokens: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        found = [(number, end) for number, end in found if end < len(docs[number])]
        if not found:
            break
        counts = Counter(docs[number][end] for number, end in found)
        latest = {docs[number][end]: (number, end) for number, end in sorted(found)}
        best = max(counts, key=lambda token: (counts[token], latest[token]))
        tokens.append(best)
        found = [(number, end + 1) for number, end in found if docs[number][end] == best]
    return tokens


def joined(docs: list[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable([*doc, SEPARATOR] for doc in docs))[:-1]


# -- the text itself -------------------------------------------------------------------------------------------------


@given(short_texts, st.integers(0, 12))
def test_match_equals_scan_after_every_token(text: list[int], max_tokens: int) -> None:
    automaton = SuffixAutomaton()
    assert automaton.match(max_tokens) is None
    for end, token in enumerate(text, 1):
        automaton.extend([token])
        assert automaton.match(max_tokens) == scan(text[:end], max_tokens)


@given(long_texts)
def test_match_in_long_text_is_longest_and_occurs(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for end, token in enumerate(text, 1):
        automaton.extend([token])
        length = automaton.matched
        assert length == longest(text[:end])
        if length:
            match = automaton.match(1)
            assert match is not None
            assert match.tokens[0] in {text[place] for place in places(text[:end], length)}


@given(long_texts)
def test_extend_at_once_equals_token_by_token(text: list[int]) -> None:
    at_once, one_by_one = SuffixAutomaton(), SuffixAutomaton()
    at_once.extend(text)
    for token in text:
        one_by_one.extend([token])
    assert at_once.match(9) == one_by_one.match(9)
    assert at_once.tokens == one_by_one.tokens == text


def test_latest_occurrence_is_continued() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 10, 1, 2, 20, 1, 2, 30, 5, 1, 2])
    assert automaton.match(2) == Match([30, 5], 2)
    automaton.extend([9, 2])  # the position of a shorter match is up to date as well
    assert automaton.match(1) == Match([9], 1)


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 3, 1, 2, 3, 1])
    assert automaton.match(7) == Match([2, 3, 1, 2, 3, 1, 2], 4)
    automaton.extend([7, 1])
    assert automaton.match(7) == Match([7, 1], 1)  # one token does not make a pattern of two


def test_short_match_after_long_run_has_a_position() -> None:
    automaton = SuffixAutomaton()
    automaton.extend([1] * (10 * MAX_REFRESHED) + [2, 1])
    match = automaton.match(3)
    assert match is not None
    assert match.length == 1
    assert match.tokens[0] in (1, 2)


HARD_TEXTS = {
    "run": lambda n: [0] * n,
    "two": lambda n: [i % 2 for i in range(n)],
    "split": lambda n: [0] * (n // 2) + [1] + [0] * (n // 2),
    "splits": lambda n: [int(i % 3 == 0) for i in range(n // 2)] + [int(i % 3 == 1) for i in range(n // 2)],
    "random": lambda n: np.random.default_rng(0).integers(0, 3, n).tolist(),
    "distinct": lambda n: list(range(n)),
}


@pytest.mark.parametrize("kind", HARD_TEXTS)
@pytest.mark.parametrize("size", [200, 3000])
def test_work_and_memory_per_token_do_not_grow(kind: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = 0
    after = suffix._States.after

    def counting(states: suffix._States, state: int, token: int) -> int | None:
        nonlocal looked_up
        looked_up += 1
        return after(states, state, token)

    monkeypatch.setattr(suffix._States, "after", counting)
    automaton = SuffixAutomaton()
    automaton.extend(HARD_TEXTS[kind](size))
    assert len(automaton._states.lengths) <= 2 * size + 1
    assert looked_up <= 5 * size


# -- a corpus --------------------------------------------------------------------------------------------------------


@given(documents, long_texts, st.integers(0, 12))
def test_cursor_equals_scan_of_documents(docs: list[list[int]], text: list[int], max_tokens: int) -> None:
    cursor = CorpusAutomaton(joined(docs)).cursor()
    for end, token in enumerate(text[:30], 1):
        cursor.advance(token)
        expected = scan_corpus(text[:end], docs, max_tokens)
        assert cursor.match(max_tokens) == expected
        assert cursor.matched == (expected.length if expected else 0)


def test_cursors_walk_independently() -> None:
    corpus = CorpusAutomaton([1, 2, 3, SEPARATOR, 4, 5, 6])
    one, other = corpus.cursor(), corpus.cursor()
    one.extend([1, 2])
    other.extend([4])
    assert one.match(5) == Match([3], 2)
    assert other.match(5) == Match([5, 6], 1)
    assert corpus.cursor().match(5) is None


def test_match_at_document_end_falls_back_to_shorter_match() -> None:
    cursor = CorpusAutomaton([1, 2, SEPARATOR, 3, 2, 9]).cursor()
    cursor.extend([1, 2])
    assert cursor.match(5) == Match([9], 1)
    assert cursor.matched == 1
    cursor.advance(SEPARATOR + 5)
    assert cursor.match(5) is None


def test_unknown_token_resets_the_match() -> None:
    cursor = CorpusAutomaton([1, 2, 3, 4]).cursor()
    cursor.extend([1, 2, 99])
    assert cursor.match(5) is None
    cursor.extend([2, 3])
    assert cursor.match(5) == Match([4], 2)


@pytest.mark.parametrize(("own", "corpus", "expected"), [(2, 7, "suffix"), (2, 8, "corpus"), (0, 1, "corpus")])
def test_corpus_match_must_exceed_text_match_by_bias(own: int, corpus: int, expected: str) -> None:
    tail = list(range(10, 18))
    source = SuffixSource(CorpusAutomaton([*tail[len(tail) - corpus :], 5]), static_bias=5)
    source.extend([*tail[len(tail) - own :], 6] if own else [6])
    source.extend(tail)
    match = source.match(1)
    assert match == (Match([6], own) if expected == "suffix" else Match([5], corpus))
    assert (source.source, source.matched) == (expected, match.length)


def test_short_matches_are_ignored() -> None:
    source = SuffixSource(min_match=3)
    source.extend([1, 2, 3, 9, 2, 3])
    assert source.matched == 0
    assert source.match(4) is None
    source.extend([9, 1, 2, 3])
    assert source.matched == 3
    assert source.match(2) == Match([9, 2], 3)


# -- corpus files ----------------------------------------------------------------------------------------------------


def test_corpus_round_trips_through_file(tmp_path: Path) -> None:
    np.save(tmp_path / "corpus.npy", np.array([1, 2, SEPARATOR, 99], dtype=np.int64))
    tokens = load_corpus(str(tmp_path / "corpus.npy"), 100)
    assert tokens.tolist() == [1, 2, SEPARATOR, 99]
    assert tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.array([1, 2, 100]), "from 1 to 100"),
        (np.array([1, -2]), "from -2 to 1"),
        (np.array([[1, 2]]), "shape"),
        (np.array([1.0, 2.0]), "float64"),
        (np.array([], dtype=np.int32), "0 tokens"),
        (np.array([None, 1]), "not a whole array of numbers"),
    ],
    ids=["vocabulary", "negative", "two-dimensional", "fractions", "empty", "objects"],
)
def test_unusable_corpora_are_refused(content: np.ndarray, message: str, tmp_path: Path) -> None:
    path = tmp_path / "corpus.npy"
    np.save(path, content)
    with pytest.raises(OptionError, match=message) as refused:
        load_corpus(path, 100)
    assert str(path) in str(refused.value)


def test_other_files_are_not_a_corpus(tmp_path: Path) -> None:
    good = tmp_path / "good.npy"
    np.save(good, np.arange(50))
    cases = {"text.npy": b"one two three", "empty.npy": b"", "cut.npy": good.read_bytes()[:-40]}
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(OptionError, match="not a whole array of numbers"):
            load_corpus(tmp_path / name, 100)
    np.savez(tmp_path / "several.npz", a=np.arange(3))
    with pytest.raises(DraftwoodError, match="datastore"):
        load_corpus(tmp_path / "several.npz", 100)
    with pytest.raises(OptionError, match="no such file"):
        load_corpus(tmp_path / "missing.npy", 100)
    with pytest.raises(DraftwoodError):
        load_corpus(tmp_path, 100)


def test_too_large_corpus_error_suggests_datastore(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_CORPUS_TOKENS", 9)
    np.save(tmp_path / "corpus.npy", np.arange(10))
    with pytest.raises(OptionError, match="'rest'"):
        load_corpus(tmp_path / "corpus.npy", 100)
