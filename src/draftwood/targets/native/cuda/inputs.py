"""The inputs of a pass in one buffer: filled on the host, sent to the GPU in one copy.

A captured graph reads fixed addresses. Each graph has its own ``Inputs``: a pinned buffer with numpy views for the
host, a GPU buffer of the same layout with tensor views for the kernels, and a copy between them that is part of the
graph.

The GPU is idle while the buffer is filled, so C code fills it (inputs.c), or Python where there is no compiler.
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

MAX_MOVES = 512  # cache rows that a pass can move before it starts
NO_SLOT = -1  # slot of a padding row
INPUTS_LIBRARY = Library("inputs", Path(__file__).parent / "inputs.c", ctypes.PyDLL)

Ints = npt.NDArray[np.int32]


class Moves(NamedTuple):
    """Cache rows to move, by slot."""

    sources: array[int]
    targets: array[int]


def new_moves() -> Moves:
    return Moves(array("i"), array("i"))


class _InputsRecord(ctypes.Structure):
    """The struct ``Inputs`` of inputs.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("moves", "ids", "positions", "slots", "afters", "wanted", "tiles", "words")),
        *((name, c_int64) for name in ("num_rows", "num_tiles", "num_words", "max_moves", "nodes_per_tile")),
        *((name, c_int64) for name in ("window", "filled")),
    )


class Inputs:
    def __init__(
        self, num_rows: int, num_tiles: int, nodes_per_tile: int, device: torch.device, window: int = 0
    ) -> None:
        num_words = words_per_row(num_rows)
        shapes = (
            (1 + 2 * MAX_MOVES,), (num_rows,), (num_rows,), (num_rows,), (num_rows,), (num_rows,),
            (num_tiles, TILE_FIELDS), (num_rows, num_words),
        )  # fmt: skip
        sizes = [int(np.prod(shape)) for shape in shapes]
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=on_gpu)
        self._device = torch.zeros(sum(sizes), dtype=torch.int32, device=device) if on_gpu else self._host
        ends = np.cumsum(sizes).tolist()
        bounds = [(end - size, end, shape) for end, size, shape in zip(ends, sizes, shapes, strict=True)]
        # moves: their number, the sources, the targets; afters: nodes of the row's tree written by earlier passes
        arrays = [self._host.numpy()[start:end].reshape(shape) for start, end, shape in bounds]
        tensors = [self._device[start:end].view(shape) for start, end, shape in bounds]
        self._moves, self._ids, self._positions, self._slots, self._afters = arrays[:5]
        self._wanted, self._tiles, self._words = arrays[5:]
        self.moves, self.ids, self.positions, self.slots, self.afters, self.wanted, self.tiles, self.words = tensors
        counts = num_rows, num_tiles, num_words, MAX_MOVES, nodes_per_tile, window
        self._record = _InputsRecord(*[part.ctypes.data for part in arrays], *counts, filled=num_rows)
        self._record_address = ctypes.addressof(self._record)
        self.nodes_per_tile = nodes_per_tile
        self._fill = _load_fill()

    def fill(self, batch: PackedBatch, moves: Moves) -> None:
        """Write the batch, and the moves that come before it."""
        if self._fill is None or not self._fill_in_c(self._fill, batch, moves):
            self._fill_in_python(batch, moves)

    def _fill_in_c(self, fill: Callable[..., int], batch: PackedBatch, moves: Moves) -> bool:
        """Returns False, with nothing written, if the batch is invalid."""
        memory = array("i", batch.fields), batch.token_ids, batch.parents, *moves
        segments, ids, parents, sources, targets = [part.buffer_info()[0] for part in memory]
        num_moves = len(moves.sources)
        return not fill(self._record_address, batch.num_segments, segments, ids, parents, num_moves, sources, targets)

    def _fill_in_python(self, batch: PackedBatch, moves: Moves) -> None:
        size, filled, num_moves = len(batch.token_ids), self._record.filled, len(moves.sources)
        self._moves[0] = num_moves
        self._moves[1 : 1 + num_moves] = moves.sources
        self._moves[1 + MAX_MOVES : 1 + MAX_MOVES + num_moves] = moves.targets
        self._ids[:size] = batch.token_ids
        self._positions[:size] = batch.positions()
        for segment in batch.segments:
            self._slots[segment.rows] = np.arange(segment.first_slot, segment.first_slot + segment.size)
            self._afters[segment.rows] = segment.after
        if filled > size:  # clear the rows of an earlier pass
            self._ids[size:filled] = 0
            self._positions[size:filled] = 0
            self._slots[size:filled] = NO_SLOT
            self._words[size:filled] = 0
        self._record.filled = size
        wanted = batch.logit_rows()
        self._wanted[: len(wanted)] = wanted
        write_plan(self._tiles, self._words, batch.segments, self._record.nodes_per_tile, self._record.window)

    def send(self) -> None:
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)


@lru_cache(maxsize=1)
def _load_fill() -> Callable[..., int] | None:
    library = INPUTS_LIBRARY.load()
    if library is None:
        return None
    fill: Callable[..., int] = library.draftwood_fill
    fill.restype, fill.argtypes = c_int, (c_void_p, c_int64, *[c_void_p] * 3, c_int64, *[c_void_p] * 2)  # type: ignore[attr-defined]
    return fill
