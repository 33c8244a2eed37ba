"""The bounded table of rows against a slow reference."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.sources import rowtable
from draftwood.sources.rowtable import IdRows, RowTable, ScoreRows

WIDTH = 3
Row = tuple[list[int], list[float]]

calls = st.lists(st.lists(st.integers(0, 12), max_size=9), max_size=25)
small = st.integers(1, 8)


class SlowTable:
    """A reference table, key by key."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: dict[int, Row] = {}

    def write(self, keys: Sequence[int], ids: IdRows, scores: ScoreRows) -> None:
        for key, row, row_scores in zip(keys, ids.tolist(), scores.tolist(), strict=True):
            self.rows.pop(key, None)
            if len(self.rows) == self.capacity:
                del self.rows[next(iter(self.rows))]
            self.rows[key] = (row, row_scores)


def numbered(start: int, count: int) -> tuple[IdRows, ScoreRows]:
    """Distinct rows."""
    ids = np.arange(start * WIDTH, (start + count) * WIDTH, dtype=np.int32).reshape(count, WIDTH)
    return ids, ids.astype(np.float32) / 7


def content(table: RowTable, keys: Sequence[int]) -> dict[int, Row]:
    found = {}
    for key in keys:
        row = table.row(key)
        if row is not None:
            found[key] = (table.ids[row].tolist(), table.scores[row].tolist())
    return found


def write_all(calls: Sequence[Sequence[int]], *tables: RowTable | SlowTable) -> None:
    written = 0
    for keys in calls:
        rows = numbered(written, len(keys))
        written += len(keys)
        for table in tables:
            table.write(keys, *rows)


def filled(capacity: int, keys: Sequence[int], width: int = WIDTH) -> RowTable:
    table = RowTable(width, capacity)
    rows = np.zeros((len(keys), width), dtype=np.int32)
    table.write(keys, rows, rows.astype(np.float32))
    return table


@given(calls, small)
def test_table_keeps_last_written_rows(calls: list[list[int]], capacity: int) -> None:
    table, slow = RowTable(WIDTH, capacity), SlowTable(capacity)
    write_all(calls, table, slow)
    assert content(table, range(13)) == slow.rows
    assert len(table) == len(slow.rows)


@given(calls, small)
def test_table_grows_as_it_fills(calls: list[list[int]], capacity: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rowtable, "FIRST_ROWS", 1)
        table, slow = RowTable(WIDTH, capacity), SlowTable(capacity)
    write_all(calls, table, slow)
    assert content(table, range(13)) == slow.rows
    assert len(table.ids) == len(table.scores) == len(table.counts) <= capacity


@given(st.lists(st.lists(st.integers(0, 40), max_size=20), max_size=40), st.integers(8, 30))
def test_batched_eviction_is_equivalent(calls: list[list[int]], capacity: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rowtable, "EVICTION_BATCHES", 4)  # a quarter of the table at once
        table, slow = RowTable(WIDTH, capacity), SlowTable(capacity)
        write_all(calls, table, slow)
    assert content(table, range(41)) == slow.rows
    assert len(table) == len(slow.rows)


def test_later_row_of_duplicate_key_is_kept() -> None:
    table = RowTable(1, 4)
    table.write([7, 8, 7], np.array([[1], [2], [3]], np.int32), np.array([[0.1], [0.2], [0.3]], np.float32))
    assert len(table) == 2
    assert content(table, [7, 8]) == {7: ([3], [pytest.approx(0.3)]), 8: ([2], [pytest.approx(0.2)])}
    table.write([1, 2, 3], np.zeros((3, 1), np.int32), np.zeros((3, 1), np.float32))
    assert table.row(8) is None  # 7 was written after it
    assert table.row(7) is not None


def test_one_call_may_exceed_the_capacity() -> None:
    table = RowTable(WIDTH, 3)
    ids, scores = numbered(0, 10)
    table.write(range(10), ids, scores)
    assert content(table, range(10)) == {key: (ids[key].tolist(), scores[key].tolist()) for key in (7, 8, 9)}


def test_claimed_row_is_kept_or_reset() -> None:
    table = filled(2, [1, 2])
    table.write([1], np.full((1, WIDTH), 5, np.int32), np.ones((1, WIDTH), np.float32))
    table.counts[table.row(1)] = 2
    (known, new) = table.claim([1, 3])  # 2 is evicted for 3
    assert table.counts[[known, new]].tolist() == [2, 0]
    assert table.ids[known].tolist() == [5] * WIDTH
    assert table.row(2) is None
    assert (table.row(1), table.row(3)) == (known, new)


@given(calls, small, small)
def test_arrays_restore_latest_entries_in_order(calls: list[list[int]], before: int, after: int) -> None:
    table, slow = RowTable(WIDTH, before), SlowTable(before)
    write_all(calls, table, slow)
    restored = RowTable(WIDTH, after)
    restored.restore("t", table.arrays("t"))
    kept = list(slow.rows)[-after:]
    assert content(restored, range(13)) == {key: slow.rows[key] for key in kept}
    assert [restored.counts[restored.row(key)] for key in kept] == [table.counts[table.row(key)] for key in kept]
    # Later writes evict the same entries as without saving and loading.
    slow.capacity, slow.rows = after, {key: slow.rows[key] for key in kept}
    write_all([[20, 21], [3], [22]], restored, slow)
    assert content(restored, range(23)) == slow.rows


@given(st.lists(st.integers(0, 2**120 - 1), unique=True, min_size=1, max_size=20))
def test_keys_may_be_longer_than_a_machine_word(keys: list[int]) -> None:
    table = RowTable(WIDTH, 100)
    ids, scores = numbered(0, len(keys))
    table.write(keys, ids, scores)
    restored = RowTable(WIDTH, 100)
    restored.restore("t", table.arrays("t"))
    assert content(restored, keys) == content(table, keys)
    assert len(restored) == len(keys)


def test_arrays_are_copies_and_carry_their_prefix() -> None:
    table = filled(4, [1, 2])
    arrays = table.arrays("own")
    assert all(name.startswith("own.") for name in arrays)
    table.write([1, 2], np.full((2, WIDTH), 9, np.int32), np.ones((2, WIDTH), np.float32))
    assert arrays["own.ids"].tolist() == [[0] * WIDTH] * 2


def test_empty_table_round_trips() -> None:
    restored = RowTable(WIDTH, 4)
    restored.restore("t", RowTable(WIDTH, 4).arrays("t"))
    assert len(restored) == 0


def test_a_restored_table_may_be_larger_than_a_new_one_starts() -> None:
    size = rowtable.FIRST_ROWS * 2 + 5
    table = filled(3 * size, range(size))
    restored = RowTable(WIDTH, 3 * size)
    restored.restore("t", table.arrays("t"))
    assert len(restored) == size
    restored.write([size], *numbered(0, 1))
    assert content(restored, [size]) == {size: ([0, 1, 2], [pytest.approx(i / 7) for i in range(3)])}


@pytest.mark.parametrize("width", [1, 8, 10, 64])
def test_a_full_table_stays_within_its_memory(width: int) -> None:
    allowed = 1 << 20
    capacity = RowTable.capacity_within(allowed, width)
    table = filled(capacity, range(2 * capacity), width)
    assert len(table) == capacity
    assert 0.9 * allowed < table.num_bytes <= allowed


def test_there_is_always_room_for_one_row() -> None:
    assert RowTable.capacity_within(1, 10) == 1


@pytest.mark.parametrize("bits", [32, 90])  # pairs of tokens, and longer n-grams
@pytest.mark.parametrize("times", [1, 3])  # just full, and renewed twice
@pytest.mark.parametrize("size", [5_000, 10_922, 10_923])  # dictionaries double after the second
def test_entry_cost_matches_memory_use(size: int, times: int, bits: int) -> None:
    rows = np.zeros((100, 10), np.int32), np.zeros((100, 10), np.float32)
    tracemalloc.start()
    try:
        table = RowTable(10, size)
        for start in range(0, times * size, 100):
            table.write([i << bits | i for i in range(start, start + 100)], *rows)
        measured, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(table) == size
    assert 0.5 * table.num_bytes < measured < 1.15 * table.num_bytes


@settings(max_examples=20)
@given(st.integers(0, 300))
def test_num_bytes_follows_the_entries(count: int) -> None:
    table = filled(1000, range(count))
    assert table.num_bytes == filled(1000, []).num_bytes + rowtable.ENTRY_BYTES * count
