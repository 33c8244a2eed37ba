"""The decoder for GPUs: passes of fixed shapes, captured as graphs at their first use and replayed from then on.

A batch runs in the smallest shape that holds it; the rows it does not fill are computed and forgotten. A shape's first
batch runs launch by launch, which compiles its kernels, and is captured after that. Batches beyond the largest shape
are never captured. Rows of the cache that acceptance moves are noted, and moved at the start of the next pass.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftwood.models import ModelConfig
from draftwood.targets.base import Flight, ForwardOutput
from draftwood.targets.cache import KVCache
from draftwood.targets.native.cuda.attention import LEAST_WORDS, WORD_BITS, bits_needed
from draftwood.targets.native.cuda.device import (
    can_overlap,
    capture,
    gpu_of,
    new_event,
    new_stream,
    on_device,
    rotation_table,
)
from draftwood.targets.native.cuda.inputs import MOST_MOVES, no_moves
from draftwood.targets.native.cuda.passes import Model, Pass, Shape, new_pass
from draftwood.targets.native.cuda.products import MOST_ROWS
from draftwood.targets.native.cuda.workspace import Workspace
from draftwood.targets.native.decoder import Decoder, PackedBatch
from draftwood.targets.native.weights import Weights
from draftwood.targets.toprows import TopRows

# What passes are made for. The shapes that a server's traffic brings about must be few: each is captured once.
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # positions
SEQUENCES = (1, 4, 16, 64, 256)
FEW_LOGITS = 64  # rows of logits in a wide pass that wants few of them; else there are some for all its rows
LARGE_STEP = 512  # larger passes are rounded up to a multiple of that, and not captured
KEPT_PASSES = 160


class Answer:
    """What a pass has found, as far as that is asked for. Views of its memory are made once for each number of rows."""

    def __init__(self, work: Pass) -> None:
        self._logits, self._taps, self._best = work.logits, work.taps, work.best()
        self._greedy = torch.zeros(len(work.logits), dtype=torch.int64)
        self._greedy_array = self._greedy.numpy()
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def first(self, count: int) -> ForwardOutput:
        """Of the first rows of logits. The best entries are copied: they lie on the host, and are few."""
        best = TopRows._make(part[:count].copy() for part in self._best)
        self._greedy_array[:count] = best.ids[:, 0]
        if count not in self._views:
            self._views[count] = self._logits[:count], self._greedy[:count]
        return ForwardOutput(*self._views[count], self._taps, best)

    def at(self, rows: Sequence[int]) -> ForwardOutput:
        """Of some of the rows of logits, in that order."""
        best, index = self._best.at(rows), torch.tensor(rows, device=self._logits.device)
        return ForwardOutput(self._logits[index], torch.from_numpy(best.ids[:, 0].astype("int64")), self._taps, best)


class Captured(NamedTuple):
    work: Pass
    graph: torch.cuda.CUDAGraph | None  # None: launched one by one
    answer: Answer
    done: torch.cuda.Event | None = None  # has happened when the answer is on the host; None: at once


class CudaFlight(Flight):
    def __init__(self, captured: Captured, batch: PackedBatch, num_wanted: int, with_best: bool) -> None:
        self._captured = captured
        self._batch = batch
        self._num_wanted = num_wanted
        self._with_best = with_best
        self._was_asked_for = False
        self._aside: ForwardOutput | None = None

    def wait(self) -> ForwardOutput:
        self._was_asked_for = True
        return self._found() if self._aside is None else self._aside

    def put_aside(self) -> None:
        """Copies the result, unless it was asked for: the lane goes to somebody else, such as another engine."""
        if not self._was_asked_for:
            found = self._found()
            taps = None if found.taps is None else found.taps.clone()
            self._aside = found._replace(logits=found.logits.clone(), greedy_ids=found.greedy_ids.clone(), taps=taps)

    def _found(self) -> ForwardOutput:
        captured, batch, num_wanted = self._captured, self._batch, self._num_wanted
        if captured.done is not None:
            captured.done.synchronize()
        size = len(batch.token_ids)
        rows = range(num_wanted) if captured.work.selects_rows or num_wanted == size else batch.logit_rows()
        if not rows or rows[-1] == num_wanted - 1:  # they ascend: all rows from the first on
            output = captured.answer.first(num_wanted)
        else:
            output = captured.answer.at(rows)
        taps = None if output.taps is None else output.taps[:size]
        return output._replace(taps=taps, top=output.top if self._with_best else None)


class CudaDecoder(Decoder):
    name = "fused-cuda"
    pass_sizes = ROWS
    num_lanes = 2

    def __init__(self, config: ModelConfig, weights: Weights, cache: KVCache) -> None:
        device = weights.embed.device
        self._device = device
        self._cache = cache
        self._workspace = Workspace(config, weights.embed.dtype, device)
        self._model = Model(
            config,
            weights,
            cache,
            rotation_table(config, cache.num_slots, weights.embed.dtype, device),
            gpu_of(device),
            can_overlap(device),
        )
        self._passes: OrderedDict[Shape, Captured] = OrderedDict()
        self._stream = new_stream(device)  # that graphs are captured on
        self._moves = no_moves()  # rows of the cache that change their slots before the next pass
        self._touched: set[int] = set()  # slots that have to do with these
        self._latest: dict[int, CudaFlight] = {}  # by lane
        self.num_best = 0  # entries of each row of logits that a pass finds beside the greedy choice; 0: none

    def forward(self, batch: PackedBatch, tap_layers: tuple[int, ...]) -> ForwardOutput:
        return self.launch(batch, tap_layers, 0).wait()

    def launch(self, batch: PackedBatch, tap_layers: tuple[int, ...], lane: int) -> Flight:
        if lane in self._latest:
            self._latest.pop(lane).put_aside()
        num_wanted = sum([segment.num_logits for segment in batch.segments])
        shape = _shape(batch, num_wanted, max(self.num_best, 1), tap_layers)._replace(lane=lane)
        captured = self._passes.get(shape)
        with on_device(self._device):
            if captured is None:
                self._move_now()  # a first run may fail, and moves must not be done twice
                captured = self._passes[shape] = self._first_run(shape, batch)
                while len(self._passes) > KEPT_PASSES:
                    self._passes.popitem(last=False)
            else:
                captured.work.inputs.fill(batch, self._moves)
                self._forget_moves()
                _run_again(captured)
                self._passes.move_to_end(shape)
            if captured.done is not None:
                captured.done.record()
        flight = self._latest[lane] = CudaFlight(captured, batch, num_wanted, self.num_best > 0)
        return flight

    def move_rows(self, sources: list[int], first: int) -> None:
        """Noted, and done by the next pass; at once where they are many, or have to do with others that wait."""
        targets = range(first, first + len(sources))
        touched = {*sources, *targets}
        if len(sources) + len(self._moves.sources) > MOST_MOVES or not self._touched.isdisjoint(touched):
            self._move_now()
        if len(sources) > MOST_MOVES:
            self._cache.move_rows(sources, first)
        else:
            self._moves.sources.extend(sources)
            self._moves.targets.extend(targets)
            self._touched |= touched

    def _move_now(self) -> None:
        if self._touched:
            sources, targets = (torch.tensor(slots.tolist(), device=self._device) for slots in self._moves)
            for rows in (self._cache.keys, self._cache.values):
                rows[:, :, targets] = rows[:, :, sources]
            self._forget_moves()

    def _forget_moves(self) -> None:
        if self._touched:
            self._moves, self._touched = no_moves(), set()

    @torch.inference_mode()
    def _first_run(self, shape: Shape, batch: PackedBatch) -> Captured:
        """Launch by launch; captures the pass behind that, if it may be captured."""
        work = new_pass(self._model, shape, self._workspace)
        work.inputs.fill(batch, self._moves)
        work.launch()
        graph = None
        if self._stream is not None and shape.num_rows <= ROWS[-1]:
            graph = capture(work.launch, self._stream, self._device)
        return Captured(work, graph, Answer(work), new_event(self._device))


def _run_again(captured: Captured) -> None:
    if captured.graph is not None:
        captured.graph.replay()
    else:
        with torch.inference_mode():
            captured.work.launch()


def _shape(batch: PackedBatch, num_wanted: int, num_best: int, taps: tuple[int, ...]) -> Shape:
    """The shape that the batch runs in."""
    size = len(batch.token_ids)
    grown = max([bits_needed(segment) for segment in batch.segments if segment.after], default=0)
    if grown > LEAST_WORDS * WORD_BITS:  # more rows have more ancestor words
        size = max(size, grown)
    num_rows = _rounded(size, ROWS)
    num_sequences = min(_rounded(len(batch.segments), SEQUENCES), num_rows)
    return Shape(num_rows, num_sequences, _num_logits(num_rows, num_wanted), num_best, taps)


def _num_logits(num_rows: int, num_wanted: int) -> int:
    """Rows of logits of a pass in which so many are wanted."""
    if num_wanted == 0 or num_rows <= MOST_ROWS:
        return num_rows if num_wanted else 0
    if num_wanted <= FEW_LOGITS:
        return min(FEW_LOGITS, num_rows)
    return num_rows if num_rows <= ROWS[-1] else _rounded(num_wanted, ROWS)


def _rounded(size: int, sizes: Sequence[int]) -> int:
    """The next of the sizes; beyond the last one the next large step."""
    return sizes[bisect_left(sizes, size)] if size <= sizes[-1] else -(-size // LARGE_STEP) * LARGE_STEP
