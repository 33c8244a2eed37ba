"""The inputs of a pass: C and Python fill the buffer identically."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftwood.errors import OptionError
from draftwood.targets.base import chain_parents
from draftwood.targets.native.cuda import inputs
from draftwood.targets.native.cuda.attention.plan import max_tiles
from draftwood.targets.native.cuda.inputs import INPUTS_LIBRARY, MAX_MOVES, Inputs, Moves, new_moves
from draftwood.targets.native.decoder import PackedBatch, PackedSegment
from tests.conftest import random_parents

pytestmark = pytest.mark.skipif(
    INPUTS_LIBRARY.load() is None, reason=f"not compiled: {INPUTS_LIBRARY.why_unavailable()}"
)

CPU = torch.device("cpu")
MAX_ROWS, MAX_SEQUENCES = 150, 6


def two_inputs(
    num_rows: int = MAX_ROWS, num_tiles: int | None = None, per_tile: int = 4, window: int = 0
) -> tuple[Inputs, Inputs]:
    """One is filled in C, one in Python."""
    tiles = max_tiles(num_rows, MAX_SEQUENCES, per_tile) if num_tiles is None else num_tiles
    compiled = Inputs(num_rows, tiles, per_tile, CPU, window)
    with mock.patch.object(inputs, "_load_fill", return_value=None):
        python = Inputs(num_rows, tiles, per_tile, CPU, window)
    assert compiled._fill is not None
    assert python._fill is None
    return compiled, python


def random_batch(rng: random.Random) -> PackedBatch:
    segments: list[PackedSegment] = []
    start, base = 0, rng.randrange(5)
    for _ in range(rng.randint(1, MAX_SEQUENCES)):
        size, prefix_len = rng.randint(1, MAX_ROWS // MAX_SEQUENCES), rng.randrange(40)
        after = rng.choice([0, 1, rng.randrange(120)])  # nodes of earlier passes
        parents = chain_parents(after + size) if rng.random() < 0.3 else random_parents(rng, after + size)
        segments.append(PackedSegment(start, base, prefix_len, tuple(parents), rng.choice([0, 1, size]), after))
        start, base = start + size, base + prefix_len + after + size + rng.randrange(9)
    return PackedBatch.of([rng.randrange(1 << 20) for _ in range(start)], segments)


def moves_of(rng: random.Random, count: int) -> Moves:
    moves = new_moves()
    moves.sources.extend(rng.randrange(1 << 16) for _ in range(count))
    moves.targets.extend(rng.randrange(1 << 16) for _ in range(count))
    return moves


def content(filled: Inputs) -> list[list[int]]:
    """The parts that kernels read: entries beyond the number of moves and of requested rows are unused."""
    moves = filled.moves.tolist()
    count = moves[0]
    used = [moves[: 1 + count], moves[1 + MAX_MOVES : 1 + MAX_MOVES + count]]
    return [*used, *(getattr(filled, name).tolist() for name in ("ids", "positions", "slots", "wanted", "tiles"))]


@given(st.integers(0, 1 << 30), st.integers(1, 16), st.sampled_from([0, 1, 2, 7, 300]))
def test_c_and_python_inputs_are_equal_over_passes(seed: int, per_tile: int, window: int) -> None:
    rng = random.Random(seed)
    compiled, python = two_inputs(per_tile=per_tile, window=window)
    for _ in range(3):  # each leaves data that the next one has to clear
        batch, moves = random_batch(rng), moves_of(rng, rng.choice([0, 1, 7, MAX_MOVES]))
        compiled.fill(batch, moves)
        python.fill(batch, moves)
        assert content(compiled) == content(python)
        size = len(batch.token_ids)
        assert np.array_equal(compiled.words.numpy()[:size], python.words.numpy()[:size])


def test_a_tree_that_takes_several_words() -> None:
    rng = random.Random(3)
    compiled, python = two_inputs()
    parents = random_parents(rng, MAX_ROWS)
    batch = PackedBatch.of(list(range(MAX_ROWS)), [PackedSegment(0, 3, 9, parents, MAX_ROWS)])
    for each in (compiled, python):
        each.fill(batch, new_moves())
    assert compiled.words.shape == (MAX_ROWS, 5)
    assert torch.equal(compiled.words, python.words)
    assert compiled.wanted.tolist() == list(range(MAX_ROWS))


def test_padding_rows_have_no_slot() -> None:
    compiled, _ = two_inputs()
    for size in (20, 5):
        compiled.fill(PackedBatch.of([7] * size, [PackedSegment(0, 2, 3, chain_parents(size), 1)]), new_moves())
    assert compiled.slots.tolist() == [5, 6, 7, 8, 9] + [-1] * (MAX_ROWS - 5)
    assert compiled.ids.tolist() == [7] * 5 + [0] * (MAX_ROWS - 5)
    assert compiled.positions.tolist() == [3, 4, 5, 6, 7] + [0] * (MAX_ROWS - 5)
    assert compiled.wanted.tolist()[0] == 4


def test_nodes_of_earlier_passes() -> None:
    """Nodes 2 and 3, below the root and below node 1; then nodes 4 to 6 below these."""
    for each in two_inputs(num_rows=4, window=3):
        each.fill(PackedBatch.of([7, 8], [PackedSegment(0, 10, 5, (-1, 0, 0, 1), 2, 2)]), new_moves())
        assert each.positions.tolist() == [6, 7, 0, 0]
        assert each.slots.tolist() == [17, 18, -1, -1]
        assert each.tiles.tolist()[0] == [0, 2, 10, 5, 0, 0, 2]
        assert each.words.tolist()[:2] == [[1, 0, 0, 0, 0b01], [2, 0, 0, 0, 0b11]]
        grown = PackedSegment(0, 10, 5, (-1, 0, 0, 1, 2, 3, 5), 3, 4)
        each.fill(PackedBatch.of([1, 2, 3], [grown]), new_moves())
        assert each.positions.tolist() == [7, 8, 9, 0]
        assert each.slots.tolist() == [19, 20, 21, -1]
        assert each.words.tolist()[:3] == [[1, 0, 0, 0, 0b0101], [2, 0, 0, 0, 0b1010], [6, 0, 0, 0, 0b1000]]


def test_too_large_batches_are_refused_without_stray_writes() -> None:
    """C writes nothing at all; Python reports the error."""
    tree = PackedBatch.of([1] * 9, [PackedSegment(0, 0, 0, (-1, 0, 0, 0, 1, 1, 2, 2, 3), 9)])
    for each in two_inputs(num_rows=9, num_tiles=2):
        with pytest.raises(OptionError, match="tiles"):
            each.fill(tree, new_moves())
    for each in two_inputs(num_rows=8):
        with pytest.raises(ValueError, match="broadcast"):
            each.fill(tree, new_moves())
    unsound = PackedBatch.of([1, 1, 1], [PackedSegment(0, 0, 0, (-1, 2, 0), 3)])
    for each in two_inputs():
        with pytest.raises(IndexError):
            each.fill(unsound, new_moves())
    for each in two_inputs():
        with pytest.raises(ValueError, match="broadcast"):
            each.fill(tree, moves_of(random.Random(0), 2 * MAX_MOVES + 1))
