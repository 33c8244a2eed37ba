"""Recordings: rows of logits are stored and restored, and their files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from draftwood.bench.replay import Recording, compute_figures, load_recording, replay, save_recording
from draftwood.bench.replay.dense_rows import DenseRows, heights
from draftwood.bench.replay.rows import ON_TEXT, RowArrays, RowStore
from draftwood.errors import DraftwoodError
from draftwood.targets.find_top import top_rows
from tests.tools.replay import goose, method_of, recorded, target  # noqa: F401 - goose and target are fixtures

# -- rows ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from([6, 7, 40, 258]))
def test_dense_rows_restore_recorded_rows(seed: int, width: int, vocab_size: int) -> None:
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(seed)) * 4
    logits[0] = logits[0].round()  # ties
    top = top_rows(logits, width)
    above = heights(top.logits - top.log_total[:, None], vocab_size)
    again = top_rows(DenseRows(vocab_size).fill(top.ids, above), width)
    assert (again.ids == top.ids).all()
    np.testing.assert_allclose(again.probs(), top.probs(), rtol=2e-5, atol=2e-5)


def test_equal_and_nearly_equal_tokens_keep_their_order() -> None:
    logprobs = np.array([[-1.0, -1.0, np.nextafter(np.float32(-1.0), np.float32(-2.0))]], np.float32)
    ids = np.array([[7, 3, 1]], np.int32)  # against the order of ids
    assert top_rows(DenseRows(50).fill(ids, heights(logprobs, 50)), 3).ids.tolist() == [[7, 3, 1]]
    sure = np.array([[0.0, -60.0, -61.0]], np.float32)
    again = top_rows(DenseRows(50).fill(ids, heights(sure, 50)), 3)
    assert again.ids.tolist() == [[7, 3, 1]]
    assert again.probs()[0, 0] == pytest.approx(1.0, abs=1e-5)


def test_reused_dense_rows_are_cleared() -> None:
    dense = DenseRows(20)
    dense.fill(np.array([[1, 2], [3, 4]], np.int32), np.full((2, 2), 5.0, np.float32))
    later = dense.fill(np.array([[7, 8]], np.int32), np.array([[3.0, 2.0]], np.float32))
    assert later.shape == (1, 20)
    assert later.nonzero().tolist() == [[0, 7], [0, 8]]
    both = dense.fill(np.array([[0, 1], [5, 6]], np.int32), np.ones((2, 2), np.float32))
    assert both.nonzero().tolist() == [[0, 0], [0, 1], [1, 5], [1, 6]]


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=20), st.lists(st.lists(st.integers(0, 3), max_size=4))
)
def test_merged_recordings_keep_every_context_once(first: list[list[int]], second: list[list[int]]) -> None:
    """Contexts here are runs of tokens that branch off at position 0; each row contains the number of its run."""

    def number(run: Sequence[int]) -> int:
        return int("1" + "".join(map(str, run)))

    def book_of(runs: list[list[int]]) -> RowStore:
        book = RowStore(1)
        book.add([(ON_TEXT, 0)], np.array([[number([])]], np.int32), np.zeros((1, 1), np.float32))
        for run in runs:
            parent = 0
            for end, token in enumerate(run, start=1):
                row = np.array([[number(run[:end])]], np.int32)
                (parent,) = book.add([(parent, token)], row, np.zeros((1, 1), np.float32))
        return book

    merge_manifests = book_of(first)
    merge_manifests.merge(book_of(second))
    arrays = merge_manifests.arrays()
    expected = {number(run[:end]) for run in [[], *first, *second] for end in range(len(run) + 1)}
    assert sorted(arrays.ids[:, 0].tolist()) == sorted(expected)
    again = RowStore.of(arrays)
    for run in [*first, *second]:
        row = again.find(ON_TEXT, 0)
        for end, token in enumerate(run, start=1):
            assert row is not None
            row = again.find(row, token)
            assert arrays.ids[row, 0] == number(run[:end])


# -- files -----------------------------------------------------------------------------------------------------------


def test_recording_round_trips_through_file(goose: Recording, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "a.recording"
    save_recording(path, goose)
    again = load_recording(path)
    assert again.methods == goose.methods
    assert again.target == goose.target
    for ours, theirs in zip(goose.requests, again.requests, strict=True):
        assert {**vars(ours), "rows": None} == {**vars(theirs), "rows": None}
        for name in RowArrays._fields:
            np.testing.assert_array_equal(getattr(ours.rows.arrays(), name), getattr(theirs.rows.arrays(), name))
    method = method_of("goose")
    assert (
        compute_figures(again, method, replay(again, method)).tau
        == compute_figures(goose, method, replay(goose, method)).tau
    )
    assert [entry.name for entry in path.parent.iterdir()] == ["a.recording"]  # no partial file


@pytest.fixture
def saved(goose: Recording, tmp_path: Path) -> Path:
    path = tmp_path / "a.recording"
    save_recording(path, goose)
    return path


def rewrite(path: Path, about: dict[str, str] | None = None, **arrays: Any) -> None:
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    save_file({**load_file(path), **arrays}, path, {**metadata, **(about or {})})


def test_other_files_are_not_recordings(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no recording")
    save_file({"a": np.zeros(1)}, tmp_path / "other")
    for name, what in (("absent", "cannot be read"), ("text", "cannot be read"), ("other", "is not a recording")):
        with pytest.raises(DraftwoodError, match=what):
            load_recording(tmp_path / name)
    with pytest.raises(DraftwoodError, match="cannot be read"):
        load_recording(tmp_path)
    rewrite(saved, {"version": "99"})
    with pytest.raises(DraftwoodError, match=r"another version\n.*99"):
        load_recording(saved)


@pytest.mark.parametrize(
    "damage",
    [
        lambda a: {"tokens": a["tokens"][:-1]},
        lambda a: {"tokens": a["tokens"] + 400},
        lambda a: {"ids": a["ids"] - 1000},
        lambda a: {"logprobs": a["logprobs"] * np.float32(np.nan)},
        lambda a: {"parents": np.full_like(a["parents"], 5)},
        lambda a: {"labels": np.zeros_like(a["labels"])},
        lambda a: {"labels": a["labels"] + 500},  # no position of the text has a row
    ],
)
def test_damaged_recordings_are_refused(saved: Path, damage: Any) -> None:
    rewrite(saved, **damage(load_file(saved)))
    with pytest.raises(DraftwoodError, match="cannot be read as a recording"):
        load_recording(saved)


def test_empty_recordings_are_refused(goose: Recording, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(DraftwoodError, match="Nothing was recorded"):
        save_recording(tmp_path / "none", Recording(target=goose.target))
    assert not (tmp_path / "none").exists()
    with safe_open(saved, framework="numpy") as file:
        about = json.loads(file.metadata()["about"])
    rewrite(saved, {"about": json.dumps({**about, "requests": []})})
    with pytest.raises(DraftwoodError, match="empty recording"):
        load_recording(saved)
