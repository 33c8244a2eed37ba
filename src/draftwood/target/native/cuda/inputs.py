"""What a pass is told, in one piece of memory: filled on the host, brought to the GPU by one copy.

A captured graph reads fixed addresses. Each has its own ``Inputs``: a pinned buffer with numpy views for the host, its
twin on the GPU with tensor views for the kernels, and a copy between them that is part of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from draftwood.target.native.cuda.attention_plan import TILE_FIELDS, WORD_BITS, write_plan
from draftwood.target.native.decoder import PackedBatch

MOST_MOVES = 256  # cache rows that a pass moves before it starts
NO_SLOT = -1  # of a row that only fills up the pass

Ints = npt.NDArray[np.int32]


class Inputs:
    def __init__(self, num_rows: int, num_tiles: int, nodes_per_tile: int, device: torch.device) -> None:
        num_words = -(-num_rows // WORD_BITS)
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
        # Moves are their number, the sources, the destinations.
        arrays = [self._host.numpy()[start:end].reshape(shape) for start, end, shape in bounds]
        tensors = [self._device[start:end].view(shape) for start, end, shape in bounds]
        self._moves, self._ids, self._positions, self._slots, self._wanted, self._tiles, self._words = arrays
        self.moves, self.ids, self.positions, self.slots, self.wanted, self.tiles, self.words = tensors
        self._nodes_per_tile = nodes_per_tile
        self._filled = num_rows

    def fill(self, batch: PackedBatch, wanted: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        """``wanted``: rows whose logits are. ``moves``: sources and destinations."""
        size = len(batch.token_ids)
        self._moves[0] = len(moves)
        if moves:
            pairs = np.array(moves, dtype=np.int32)
            self._moves[1 : 1 + len(moves)] = pairs[:, 0]
            self._moves[1 + MOST_MOVES : 1 + MOST_MOVES + len(moves)] = pairs[:, 1]
        self._ids[:size] = batch.token_ids
        self._positions[:size] = batch.positions
        for segment in batch.segments:
            rows = slice(segment.start, segment.start + len(segment.parents))
            first = segment.base + segment.prefix_len
            self._slots[rows] = np.arange(first, first + len(segment.parents))
        if self._filled > size:  # what an earlier pass left there
            self._ids[size : self._filled] = 0
            self._positions[size : self._filled] = 0
            self._slots[size : self._filled] = NO_SLOT
        self._filled = size
        self._wanted[: len(wanted)] = wanted
        write_plan(self._tiles, self._words, batch.segments, self._nodes_per_tile)

    def send(self) -> None:
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)
