"""N-gram tables: running averages against a slow reference, lookups, limits, files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.drafters.memory import MemoryConfig, MemoryKeeper, load_memory, save_memory
from draftwood.errors import DraftwoodError
from draftwood.sources import ngrams
from draftwood.sources.ngrams import NgramTables, merge
from draftwood.sources.rowtable import NOTHING
from draftwood.targets.tiny import tiny_target

VOCAB, WIDTH = 9, 3


class SlowTables:
    """The same with dictionaries: one n-gram and one row at a time."""

    def __init__(self, max_ngram: int) -> None:
        self._max_ngram = max_ngram
        self.rows: dict[tuple[int, ...], tuple[dict[int, float], int]] = {}

    def learn(self, text: list[int], new: dict[int, float]) -> None:
        for size in range(1, min(self._max_ngram, len(text)) + 1):
            stored, count = self.rows.get(tuple(text[-size:]), ({}, 0))
            mean = {
                token: (count * stored.get(token, 0.0) + new.get(token, 0.0)) / (count + 1) for token in {*stored, *new}
            }
            best = sorted((-prob, token) for token, prob in mean.items() if prob > 0.0)[:WIDTH]
            self.rows[tuple(text[-size:])] = {token: -negative for negative, token in best}, count + 1

    def lookup(self, text: list[int]) -> dict[int, float] | None:
        for size in range(self._max_ngram, 0, -1):
            if tuple(text[-size:]) in self.rows and size <= len(text):
                return self.rows[tuple(text[-size:])][0]
        return None


def row_of(rng: np.random.Generator) -> tuple[list[int], list[float]]:
    """A random row, sometimes with zeros at its end."""
    ids = rng.choice(VOCAB, size=WIDTH, replace=False)
    probs = np.sort(rng.dirichlet(np.ones(WIDTH)))[::-1].copy()
    probs[int(rng.integers(1, WIDTH + 1)) :] = 0.0
    return ids.tolist(), probs.tolist()


def learn(tables: NgramTables, texts: list[list[int]], rows: list[tuple[list[int], list[float]]]) -> None:
    ids = np.array([row[0] for row in rows], dtype=np.int32)
    probs = np.array([row[1] for row in rows], dtype=np.float32)
    tables.learn([tables.context(text) for text in texts], ids, probs)


@given(
    calls=st.lists(
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=8), min_size=1, max_size=6
    ),
    max_ngram=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=150, deadline=None)
def test_running_averages_equal_a_slow_reference(calls: list[list[list[int]]], max_ngram: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    fast, slow = NgramTables(VOCAB, max_ngram, WIDTH), SlowTables(max_ngram)
    for texts in calls:
        rows = [row_of(rng) for _ in texts]
        learn(fast, texts, rows)
        for text, (ids, probs) in zip(texts, rows, strict=True):
            slow.learn(text, dict(zip(ids, probs, strict=True)))
    assert fast.num_contexts == len(slow.rows)
    for text in [text for texts in calls for text in texts] + [[8], [0, 8], [8, 0]]:
        expected, found = slow.lookup(text), fast.lookup(text)
        if expected is None:
            assert found is None
            continue
        assert found is not None
        got = dict(zip(*found, strict=True))
        # Averages in float32 may drop another token if two are equal up to rounding.
        assert sorted(got.values(), reverse=True) == pytest.approx(list(expected.values()), rel=1e-4, abs=1e-7)
        clear = {token for token, prob in expected.items() if prob > min(expected.values()) * 1.001}
        assert clear <= set(got)
        assert found[1] == sorted(found[1], reverse=True)


def test_the_same_context_twice_in_one_pass_counts_twice() -> None:
    tables = NgramTables(VOCAB, 2, WIDTH)
    row, other = ([1, 2, 3], [1.0, 0.0, 0.0]), ([2, 4, 5], [0.5, 0.5, 0.0])
    learn(tables, [[0, 7], [3, 7], [0, 7]], [row, row, other])
    assert tables.lookup([0, 7]) == ([1, 2, 4], [0.5, 0.25, 0.25])
    assert tables.lookup([3, 7]) == ([1], [1.0])
    ids, probs = tables.lookup([7]) or ([], [])
    assert ids == [1, 2, 4]
    assert probs == pytest.approx([2 / 3, 1 / 6, 1 / 6])


def test_longest_known_ngram_is_used() -> None:
    tables = NgramTables(VOCAB, 4, WIDTH)
    learn(tables, [[5, 1, 2, 3, 4]], [([6, 7, 8], [0.5, 0.25, 0.25])])
    learn(tables, [[2, 3, 4]], [([0, 7, 8], [0.5, 0.25, 0.25])])
    both = ([0, 6, 7], [0.25, 0.25, 0.25])
    assert tables.lookup([1, 2, 3, 4]) == ([6, 7, 8], [0.5, 0.25, 0.25])
    assert tables.lookup([0, 2, 3, 4]) == tables.lookup([8, 3, 4]) == tables.lookup([4]) == both
    assert tables.lookup([1, 2, 3]) is None
    assert tables.lookup([]) is None


def test_a_short_text_has_no_long_ngrams() -> None:
    tables = NgramTables(VOCAB, 4, WIDTH)
    learn(tables, [[0, 0]], [([1, 2, 3], [0.6, 0.3, 0.1])])
    assert tables.num_contexts == 2
    assert tables.context([0, 0]) != tables.context([0, 0, 0])


def test_contexts_grow_token_by_token() -> None:
    tables = NgramTables(1000, 3, WIDTH)
    text = [999, 0, 5, 0, 0, 998]
    along = tables.contexts_along(text[:2], text[2:])
    assert along == [tables.context(text[: end + 1]) for end in range(2, 6)]
    assert tables.extend_context(along[-1], 7) == tables.context([*text, 7])


def test_merge_keeps_the_largest_sums() -> None:
    ids = np.array([[1, 2, NOTHING], [4, 5, 6]], dtype=np.int32)
    probs = np.array([[0.3, 0.2, 0.0], [0.0, 0.0, 0.0]], dtype=np.float32)
    more_ids = np.array([[2, 3, NOTHING], [6, 4, 5]], dtype=np.int32)
    more = np.array([[0.2, 0.1, 0.0], [0.5, 0.0, 0.0]], dtype=np.float32)
    got_ids, got = merge(ids, probs, more_ids, more)
    assert np.where(got > 0.0, got_ids, NOTHING).tolist() == [[2, 1, 3], [6, NOTHING, NOTHING]]
    assert got == pytest.approx(np.array([[0.4, 0.3, 0.1], [0.5, 0.0, 0.0]]))
    assert ids.tolist()[0] == [1, 2, NOTHING]  # the input is not modified
    assert probs.tolist()[1] == [0.0, 0.0, 0.0]


def test_ties_go_to_the_lower_token() -> None:
    tables = NgramTables(VOCAB, 1, WIDTH)
    learn(tables, [[0], [0]], [([7, 5, 3], [0.25, 0.25, 0.25]), ([8, 4, 2], [0.25, 0.25, 0.25])])
    assert tables.lookup([0])[0] == [2, 3, 4]  # type: ignore[index]


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    tables = NgramTables(60_000, 4, 10, megabytes=1)
    assert 1000 < tables.capacity < 10_000
    ids, probs = np.tile(np.arange(10, dtype=np.int32), (50, 1)), np.full((50, 10), 0.1, dtype=np.float32)
    text = list(range(50_000))
    for start in range(0, 20_000, 50):
        tables.learn(tables.contexts_along(text[max(start - 4, 0) : start], text[start : start + 50]), ids, probs)
    assert tables.num_contexts == tables.capacity
    assert tables.num_bytes <= 1 << 20
    assert tables.lookup([0]) is None
    assert tables.lookup([19_999]) is not None
    small = NgramTables(VOCAB, 4, WIDTH, megabytes=0)  # room for a single row
    learn(small, [[1, 2, 3, 4], [4]], [([1, 2, 3], [0.6, 0.3, 0.1]), ([5, 6, 7], [0.6, 0.3, 0.1])])
    assert small.num_contexts == 1
    assert small.lookup([4]) is not None


def test_prompt_is_new_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = NgramTables(VOCAB)
    assert tables.is_new_prompt([1, 2, 3], 0)
    assert not tables.is_new_prompt([1, 2, 3], 0)
    assert tables.is_new_prompt([1, 2, 3, 4], 3)
    assert tables.is_new_prompt([1, 2, 3, 4], 0)
    assert tables.is_new_prompt([1, 2], 0)
    monkeypatch.setattr(ngrams, "MAX_PROMPTS", 4)
    assert tables.is_new_prompt([5], 0)  # the first one is forgotten
    assert not tables.is_new_prompt([1, 2, 3, 4], 3)
    assert tables.is_new_prompt([1, 2, 3], 0)


def filled(vocab_size: int = 100_000) -> NgramTables:
    rng = np.random.default_rng(0)
    tables = NgramTables(vocab_size, 4, WIDTH)
    text = rng.integers(vocab_size - 30, vocab_size, 200).tolist()
    rows = [row_of(rng) for _ in text]
    learn(tables, [text[: end + 1] for end in range(len(text))], rows)
    tables.is_new_prompt(text, 0)
    return tables


def test_memory_file_restores_everything(tmp_path: Path) -> None:
    tables, path = filled(), tmp_path / "tables.memory"
    save_memory(path, tables, "model")
    again = NgramTables(100_000, 4, WIDTH)
    load_memory(path, again, "model")
    before, after = tables.arrays(), again.arrays()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert again.num_contexts == tables.num_contexts > 400
    for other in (NgramTables(100_000, 3, WIDTH), NgramTables(100_000, 4, WIDTH + 1), NgramTables(500_000, 4, WIDTH)):
        with pytest.raises(DraftwoodError, match="other tables"):
            load_memory(path, other, "model")


def test_keeper_shares_and_saves_empty_memory(tmp_path: Path) -> None:
    info = tiny_target().info

    def new() -> NgramTables:
        return NgramTables(info.vocab_size, 4, WIDTH)

    by_prompt = MemoryKeeper(new, MemoryConfig("prompt"), info)
    first = by_prompt.get(1)
    assert by_prompt.get(1) is first
    assert by_prompt.get(2) is not first
    plan = MemoryConfig("process", tmp_path / "tables.memory")
    keeper = MemoryKeeper(new, plan, info)
    memory = keeper.get(1)
    assert isinstance(memory, NgramTables)
    assert keeper.get(2) is memory
    learn(memory, [[1, 2]], [([1, 2, 3], [0.6, 0.3, 0.1])])
    keeper.save()
    opened = MemoryKeeper(new, plan, info).get(1)
    assert isinstance(opened, NgramTables)
    assert opened.lookup([1, 2]) == memory.lookup([1, 2])
