"""The decoder for GPUs: passes of fixed shapes, captured as graphs at their first use and replayed from then on.

A batch runs in the smallest shape that holds it; the rows it does not fill are computed and forgotten. A shape's first
batch runs launch by launch, which compiles its kernels, and is captured after that. Batches beyond the largest shape
are never captured. Rows of the cache that acceptance moves are noted, and moved at the start of the next pass.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftwood.target.base import ForwardOutput
from draftwood.target.cache import KVCache
from draftwood.target.native.config import ModelConfig
from draftwood.target.native.cuda.inputs import MOST_MOVES
from draftwood.target.native.cuda.passes import Model, Pass, Shape, new_pass
from draftwood.target.native.cuda.products import MOST_ROWS, Gpu
from draftwood.target.native.cuda.workspace import Workspace
from draftwood.target.native.decoder import Decoder, PackedBatch
from draftwood.target.native.rope import inverse_frequencies
from draftwood.target.native.weights import Weights
from draftwood.target.toprows import TopRows

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)  # positions that passes are made for
LARGE_STEP = 512  # larger ones are rounded up to a multiple of that, and not captured
KEPT_PASSES = 48
INTERPRETED = Gpu(num_processors=4, shared_bytes=100_000)  # where kernels are tried without a GPU


class Captured(NamedTuple):
    work: Pass
    graph: torch.cuda.CUDAGraph | None  # None: launched one by one


class CudaDecoder(Decoder):
    name = "fused-cuda"
    pass_sizes = ROWS

    def __init__(self, config: ModelConfig, weights: Weights, cache: KVCache) -> None:
        device = weights.embed.device
        self._device = device
        self._cache = cache
        self._workspace = Workspace(config, weights.embed.dtype, device)
        self._model = Model(
            config,
            weights,
            cache,
            _rotation(config, cache.num_slots, weights.embed),
            _gpu(device),
            _can_overlap(device),
        )
        self._passes: OrderedDict[Shape, Captured] = OrderedDict()
        self._moves: list[tuple[int, int]] = []  # rows of the cache that change their slots before the next pass
        self.num_best = 0  # entries of each row of logits that a pass finds beside the greedy choice; 0: none

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, tap_layers: tuple[int, ...]) -> ForwardOutput:
        wanted = _wanted_rows(batch)
        shape = _shape(batch, len(wanted), max(self.num_best, 1), tap_layers)
        captured = self._passes.get(shape)
        work = captured.work if captured is not None else new_pass(self._model, shape, self._workspace)
        work.inputs.fill(batch, wanted, self._moves)
        self._moves = []
        if captured is None:
            work.launch()
            captured = self._keep(shape, work)
        elif captured.graph is None:
            work.launch()
        else:
            captured.graph.replay()
            self._passes.move_to_end(shape)
        self._wait()
        return self._output(work, batch, wanted)

    def move_rows(self, sources: list[int], first: int) -> None:
        """Noted, and done by the next pass; at once where they are many, or have to do with others that wait."""
        moves = list(zip(sources, range(first, first + len(sources)), strict=True))
        touched = set(itertools.chain.from_iterable(self._moves))
        if len(moves) + len(self._moves) > MOST_MOVES or not touched.isdisjoint(itertools.chain.from_iterable(moves)):
            self._move_now()
        if len(moves) > MOST_MOVES:
            self._cache.move_rows(sources, first)
        else:
            self._moves += moves

    def _move_now(self) -> None:
        if self._moves:
            sources, targets = (torch.tensor(slots, device=self._device) for slots in zip(*self._moves, strict=True))
            for rows in (self._cache.keys, self._cache.values):
                rows[:, :, targets] = rows[:, :, sources]
            self._moves = []

    def _keep(self, shape: Shape, work: Pass) -> Captured:
        """Captures the pass that has just run, if it may be captured."""
        graph = None
        if self._device.type == "cuda" and shape.num_rows <= ROWS[-1]:
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize(self._device)
            with torch.cuda.device(self._device), torch.cuda.graph(graph):
                work.launch()
        captured = self._passes[shape] = Captured(work, graph)
        while len(self._passes) > KEPT_PASSES:
            self._passes.popitem(last=False)
        return captured

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _output(self, work: Pass, batch: PackedBatch, wanted: Sequence[int]) -> ForwardOutput:
        """Views of the pass's memory; what lies on the host is small and copied."""
        count = len(wanted)
        rows = range(count) if work.selects_rows else wanted
        if count == 0 or rows[-1] == count - 1:  # they ascend: all rows from the first on
            logits, best = work.logits[:count], work.best().at(slice(count))
        else:
            logits, best = work.logits[torch.tensor(rows, device=self._device)], work.best().at(rows)
        taps = None if work.taps is None else work.taps[: len(batch.token_ids)]
        best = TopRows(*(array.copy() for array in best))
        greedy = torch.from_numpy(best.ids[:, 0].astype("int64"))
        return ForwardOutput(logits, greedy, taps, best if self.num_best else None)


def _wanted_rows(batch: PackedBatch) -> list[int]:
    """Rows whose logits are wanted, ascending."""
    rows: list[int] = []
    for segment in batch.segments:
        end = segment.start + len(segment.parents)
        rows.extend(range(end - segment.num_logits, end))
    return rows


def _shape(batch: PackedBatch, num_wanted: int, num_best: int, taps: tuple[int, ...]) -> Shape:
    """The shape that the batch runs in."""
    num_rows = _rounded(len(batch.token_ids))
    num_sequences = 1 << (len(batch.segments) - 1).bit_length()
    num_logits = 0
    if num_wanted:
        num_logits = num_rows if num_rows <= MOST_ROWS else min(_rounded(max(num_wanted, 16)), num_rows)
    return Shape(num_rows, num_sequences, num_logits, num_best, taps)


def _rounded(size: int) -> int:
    return next((rows for rows in ROWS if rows >= size), -(-size // LARGE_STEP) * LARGE_STEP)


def _gpu(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    # Torch tells a program's part of a processor's shared memory since 2.6; 99 KiB is the least that the family has.
    shared = getattr(properties, "shared_memory_per_block_optin", 99 << 10)
    return Gpu(properties.multi_processor_count, int(shared))


def _can_overlap(device: torch.device) -> bool:
    """Programmatic dependent launch came with Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def _rotation(config: ModelConfig, num_positions: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [positions, D / 2], rounded as the eager decoder rounds them."""
    places = torch.arange(num_positions, device=like.device, dtype=torch.float32)
    angles = torch.outer(places, inverse_frequencies(config.rope, config.head_dim).to(like.device))
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)
