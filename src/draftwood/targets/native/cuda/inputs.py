"""What a pass is told, in one piece of memory: filled on the host, brought to the GPU by one copy.

A captured graph reads fixed addresses. Each has its own ``Inputs``: a pinned buffer with numpy views for the host, its
twin on the GPU with tensor views for the kernels, and a copy between them that is part of the graph.

The GPU waits while the buffer is filled, so it is filled in C (plan.c); in Python where there is no compiler.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from draftwood.disk import Library
from draftwood.targets.native.cuda.attention import TILE_FIELDS, words_per_row, write_plan
from draftwood.targets.native.decoder import PackedBatch

MOST_MOVES = 256  # cache rows that a pass moves before it starts
NO_SLOT = -1  # of a row that only fills up the pass
PLAN = Library("plan", Path(__file__).parent / "plan.c", ctypes.PyDLL)

Ints = npt.NDArray[np.int32]


class Moves(NamedTuple):
    """Rows of the cache that change their slots."""

    sources: array[int]
    targets: array[int]


def no_moves() -> Moves:
    return Moves(array("i"), array("i"))


class _Plan(ctypes.Structure):
    """The record of plan.c, field by field."""

    _fields_ = (
        ("moves", c_void_p),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("wanted", c_void_p),
        ("tiles", c_void_p),
        ("words", c_void_p),
        ("num_rows", c_int64),
        ("num_tiles", c_int64),
        ("num_words", c_int64),
        ("most_moves", c_int64),
        ("nodes_per_tile", c_int64),
        ("window", c_int64),
        ("filled", c_int64),
    )


class Inputs:
    def __init__(
        self, num_rows: int, num_tiles: int, nodes_per_tile: int, device: torch.device, window: int = 0
    ) -> None:
        num_words = words_per_row(num_rows)
        shapes = (
            (1 + 2 * MOST_MOVES,), (num_rows,), (num_rows,), (num_rows,), (num_rows,),
            (num_tiles, TILE_FIELDS), (num_rows, num_words),
        )  # fmt: skip
        sizes = [int(np.prod(shape)) for shape in shapes]
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=on_gpu)
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device) if on_gpu else self._host
        ends = np.cumsum(sizes).tolist()
        bounds = [(end - size, end, shape) for end, size, shape in zip(ends, sizes, shapes, strict=True)]
        # Moves are their number, the sources, the targets.
        arrays = [self._host.numpy()[start:end].reshape(shape) for start, end, shape in bounds]
        tensors = [self._device[start:end].view(shape) for start, end, shape in bounds]
        self._moves, self._ids, self._positions, self._slots, self._wanted, self._tiles, self._words = arrays
        self.moves, self.ids, self.positions, self.slots, self.wanted, self.tiles, self.words = tensors
        places = [part.ctypes.data for part in arrays]
        self._plan = _Plan(*places, num_rows, num_tiles, num_words, MOST_MOVES, nodes_per_tile, window, filled=num_rows)
        self._plan_address = ctypes.addressof(self._plan)
        self._fill = _compiled_fill()

    def fill(self, batch: PackedBatch, moves: Moves) -> None:
        """Writes what the pass is to compute, and the moves that come before it."""
        if self._fill is None or not self._fill_in_c(self._fill, batch, moves):
            self._fill_in_python(batch, moves)

    def _fill_in_c(self, fill: Callable[..., int], batch: PackedBatch, moves: Moves) -> bool:
        """False, and nothing is written, if something is wrong with the batch."""
        fields: list[int] = []
        parents: list[int] = []
        for _, base, prefix_len, of_tree, num_logits, after in batch.segments:
            fields += (base, prefix_len, after, len(of_tree) - after, num_logits)
            parents += of_tree
        memory = array("i", fields), array("i", batch.token_ids), array("i", parents), *moves
        segments, ids, above, sources, targets = [part.buffer_info()[0] for part in memory]
        num_segments, num_moves = len(batch.segments), len(moves.sources)
        return not fill(self._plan_address, num_segments, segments, ids, above, num_moves, sources, targets)

    def _fill_in_python(self, batch: PackedBatch, moves: Moves) -> None:
        size, filled, num_moves = len(batch.token_ids), self._plan.filled, len(moves.sources)
        self._moves[0] = num_moves
        self._moves[1 : 1 + num_moves] = moves.sources
        self._moves[1 + MOST_MOVES : 1 + MOST_MOVES + num_moves] = moves.targets
        self._ids[:size] = batch.token_ids
        self._positions[:size] = batch.positions()
        for segment in batch.segments:
            self._slots[segment.rows] = np.arange(segment.first_slot, segment.first_slot + segment.size)
        if filled > size:  # what an earlier pass left there
            self._ids[size:filled] = 0
            self._positions[size:filled] = 0
            self._slots[size:filled] = NO_SLOT
        self._plan.filled = size
        wanted = batch.logit_rows()
        self._wanted[: len(wanted)] = wanted
        write_plan(self._tiles, self._words, batch.segments, self._plan.nodes_per_tile, self._plan.window)

    def send(self) -> None:
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)


@lru_cache(maxsize=1)
def _compiled_fill() -> Callable[..., int] | None:
    library = PLAN.load()
    if library is None:
        return None
    fill: Callable[..., int] = library.draftwood_fill
    fill.restype, fill.argtypes = c_int, (c_void_p, c_int64, *[c_void_p] * 3, c_int64, *[c_void_p] * 2)  # type: ignore[attr-defined]
    return fill
