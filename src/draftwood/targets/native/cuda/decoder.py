"""The GPU decoder: passes of fixed shapes, captured as CUDA graphs at first use and replayed afterwards.

A batch runs in the smallest shape that holds it; the results of padding rows are ignored. If that shape was not
captured yet and a somewhat larger one was, the batch runs in the larger one. Otherwise a shape's first batch runs
launch by launch, which compiles its kernels, and is captured after that. Large shapes, of prompts, are fewer; they are
captured when they come back, and the largest are never captured.
Cache rows that acceptance moves are recorded, and moved at the start of the next pass.
"""

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import torch

from draftwood.models import ModelConfig
from draftwood.targets.base import DeviceAnswer, ForwardOutput, PendingPass
from draftwood.targets.cache import KVCache
from draftwood.targets.native.cuda.attention import MIN_WORDS, WORD_BITS, count_bits
from draftwood.targets.native.cuda.device import (
    build_rotation_table,
    capture,
    describe_gpu,
    new_event,
    new_stream,
    on_device,
    record,
    supports_pdl,
)
from draftwood.targets.native.cuda.draws import DrawnTokens, Draws
from draftwood.targets.native.cuda.inputs import MAX_MOVES, new_moves
from draftwood.targets.native.cuda.kernels import MAX_VOCABULARY
from draftwood.targets.native.cuda.passes import Model, Pass, Shape, new_pass
from draftwood.targets.native.cuda.products import MAX_ROWS
from draftwood.targets.native.cuda.searches import GraphKind, KnownSearches, SearchLaunch, fits
from draftwood.targets.native.cuda.workspace import Workspace
from draftwood.targets.native.decoder import Decoder, PackedBatch
from draftwood.targets.native.weights import Weights
from draftwood.targets.searches import Found, SearchPlan
from draftwood.targets.toprows import MAX_TOP_K, TopRows

# Sizes of passes. Few, so that the traffic of a server needs few shapes: each is captured separately.
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # positions
SEQUENCES = (1, 4, 8, 16, 32, 64, 128, 256)  # close enough that attention is tiled for the nodes of a sequence
FEW_LOGITS = 64  # rows of logits in a wide pass that wants few; otherwise it computes those of all its up to 1,024 rows
LARGE_STEP = 512  # larger passes are rounded up to a multiple of this
LARGE_SEQUENCES, LARGE_LOGITS = (1, 32, 256), (64, 256, 512, 1024)  # of larger passes: padding is a small part of them
MAX_CAPTURED = 4096  # positions: larger passes take longer than their launches
MAX_PASSES = 160  # kept at once
MAX_SEARCHES = 32  # kept at once
MAX_WASTE, MAX_LARGE_WASTE = 2, 1.25  # times the rows that a batch needs; larger shapes are not used in its place
MAX_DETOURS, MAX_LARGE_DETOURS = 1000, 16  # batches in a larger shape, which take about as long as preparing their own

PassT = TypeVar("PassT", bound=Pass)


class PassOutput:
    """Reads the results of a pass. Views of its memory are created once per number of rows."""

    def __init__(self, work: Pass) -> None:
        self._logits, self._taps, self.best = work.logits, work.taps, work.best()
        self._greedy = torch.zeros(len(work.logits), dtype=torch.int64)
        self._greedy_array = self._greedy.numpy()
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def first(self, count: int) -> ForwardOutput:
        """The results of the first ``count`` rows of logits. Top entries are copied: they are few, and on the host."""
        best = TopRows._make(part[:count].copy() for part in self.best)
        self._greedy_array[:count] = best.ids[:, 0]
        if count not in self._views:
            self._views[count] = self._logits[:count], self._greedy[:count]
        return ForwardOutput(*self._views[count], self._taps, best)

    def at(self, rows: Sequence[int]) -> ForwardOutput:
        """The results of these rows of logits, in this order."""
        best, index = self.best.at(rows), torch.tensor(rows, device=self._logits.device)
        return ForwardOutput(self._logits[index], torch.from_numpy(best.ids[:, 0].astype("int64")), self._taps, best)


@dataclass(frozen=True, slots=True)
class CapturedPass(Generic[PassT]):
    work: PassT
    graph: torch.cuda.CUDAGraph | None  # None: not captured
    output: PassOutput
    done: torch.cuda.Event | None = None  # set when the output is on the host; None: without a GPU

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
        else:
            with torch.inference_mode():
                self.work.launch()


class CudaFlight(PendingPass):
    def __init__(self, captured: CapturedPass[Pass], batch: PackedBatch, num_best: int) -> None:
        self._captured = captured
        self._batch = batch
        self.drawn: DrawnTokens | None = None
        self._num_best = num_best  # that were asked for; the pass may have found more
        self._was_read = False
        self._saved: ForwardOutput | None = None

    def wait(self) -> ForwardOutput:
        self._was_read = True
        return self._read() if self._saved is None else self._saved

    def on_device(self) -> DeviceAnswer | None:
        work, batch = self._captured.work, self._batch
        size = len(batch.token_ids)
        if work.taps is None or batch.num_segments > 1 or len(batch.parents) > size or batch.num_wanted < size:
            return None
        inputs, drawn = work.inputs, self.drawn
        choices = work.words if drawn is None else drawn.on_device[:, None]
        return DeviceAnswer(inputs.ids, inputs.positions, inputs.slots, inputs.words, inputs.tiles, choices, work.taps)

    def save(self) -> None:
        """Copy the result, unless it was read already: the next pass of the lane overwrites it."""
        if not self._was_read:
            found = self._read()
            taps = None if found.taps is None else found.taps.clone()
            self._saved = found._replace(logits=found.logits.clone(), greedy_ids=found.greedy_ids.clone(), taps=taps)

    def _read(self) -> ForwardOutput:
        captured, batch, num_wanted = self._captured, self._batch, self._batch.num_wanted
        if captured.done is not None:
            captured.done.synchronize()
        size = len(batch.token_ids)
        rows = range(num_wanted) if captured.work.selects_rows or num_wanted == size else batch.logit_rows()
        if not rows or rows[-1] == num_wanted - 1:  # rows ascend, so these are the first num_wanted rows
            output = captured.output.first(num_wanted)
        else:
            output = captured.output.at(rows)
        taps = None if output.taps is None else output.taps[:size]
        top = output.top.first(self._num_best) if output.top is not None and self._num_best else None
        return output._replace(taps=taps, top=top, drawn=None if self.drawn is None else self.drawn.read())


class CudaDecoder(Decoder):
    name = "fused-cuda"
    pass_sizes = ROWS
    num_lanes = 2

    def __init__(self, config: ModelConfig, weights: Weights, cache: KVCache, *, exact: bool = False) -> None:
        """``exact``: the logits of a node have the same bits in every pass."""
        self.is_exact = exact
        self.can_draw = config.vocab_size <= MAX_VOCABULARY
        device = weights.embed.device
        self._device = device
        self._cache = cache
        self._workspace = Workspace(config, weights.embed.dtype, device)
        self._model = Model(
            config,
            weights,
            cache,
            build_rotation_table(config, cache.num_slots, weights.embed.dtype, device),
            describe_gpu(device),
            supports_pdl(device),
            exact,
        )
        self._passes: OrderedDict[Shape, CapturedPass[Pass]] = OrderedDict()
        self._searches = KnownSearches[Pass](MAX_SEARCHES)
        self._has_window = bool(config.sliding_window)
        self._ready: dict[tuple[int, int], tuple[int, ...]] = {}  # of ``ready_sizes``, as long as no pass is added
        self._draws: dict[int, Draws] = {}  # by lane
        self._num_captured = 0
        self._detours: Counter[Shape] = Counter()  # batches that ran in a larger shape, by the shape that they need
        self._stream = new_stream(device)  # for graph capture
        self._moves = new_moves()  # cache rows to move before the next pass
        self._touched: set[int] = set()  # their source and target slots
        self._latest: dict[int, CudaFlight] = {}  # by lane
        self.num_best = 0  # top entries per row of logits that passes return; 0: only the greedy choice

    @property
    def num_prepared(self) -> int:
        return self._num_captured + self._searches.num_made

    def forward(self, batch: PackedBatch, tap_layers: tuple[int, ...]) -> ForwardOutput:
        return self.launch(batch, tap_layers, 0).wait()

    def launch(self, batch: PackedBatch, tap_layers: tuple[int, ...], lane: int) -> PendingPass:
        if lane in self._latest:
            self._latest.pop(lane).save()
        shape = _choose_shape(batch, batch.num_wanted, max(self.num_best, 1), tap_layers)
        is_single = self.is_exact and len(batch.parents) == batch.num_segments  # each is a root
        shape = shape._replace(is_single=is_single, lane=lane)
        if shape not in self._passes:
            shape = self._detour(shape)
        captured = self._passes.get(shape)
        if captured is None or (captured.graph is None and shape.num_rows <= MAX_CAPTURED):
            self._num_captured += 1
        with on_device(self._device):
            if captured is None:
                self._move_now()  # a first run may fail, and moves must not be applied twice
                captured = self._passes[shape] = self._first_run(shape, batch)
                while len(self._passes) > MAX_PASSES:
                    self._passes.popitem(last=False)
            else:
                if captured.graph is None and shape.num_rows <= MAX_CAPTURED:
                    captured = self._passes[shape] = self._capture(captured)
                captured.work.inputs.fill(batch, self._moves)
                self._forget_moves()
                captured.run()
                self._passes.move_to_end(shape)
            flight = self._latest[lane] = CudaFlight(captured, batch, self.num_best)
            try:
                if batch.draws:
                    flight.drawn = self._draw(captured.work, batch, lane)
            finally:  # after an error, too, the next launch waits for this pass
                if captured.done is not None:
                    record(captured.done, self._device)
        return flight

    @torch.inference_mode()
    def _draw(self, work: Pass, batch: PackedBatch, lane: int) -> DrawnTokens:
        if lane not in self._draws:
            self._draws[lane] = Draws(self._model.config.vocab_size, self._device)
        return self._draws[lane].launch(work, batch)

    @torch.inference_mode()
    def grow(self, batch: PackedBatch, plan: SearchPlan) -> list[Found] | None:
        shape = _choose_shape(batch, batch.num_segments, plan.best, ())
        kind = GraphKind.of(plan, shape.num_sequences)
        sizes = shape.num_rows, kind.num_trees * kind.width
        if self.is_exact or self._has_window or not fits(plan) or max(sizes) > ROWS[-1] or plan.best > MAX_TOP_K:
            return None
        if 0 in self._latest:
            self._latest.pop(0).save()
        with on_device(self._device):
            launch = self._searches.find(shape, kind, self._new_search)
            launch.root.inputs.fill(batch, self._moves)
            self._forget_moves()
            return launch.run(plan, self._stream)

    def _new_search(self, shape: Shape, kind: GraphKind) -> SearchLaunch[Pass]:
        num_rows = _round_up(kind.num_trees * kind.width, ROWS)
        below = Shape(num_rows, kind.num_trees, num_rows, shape.num_best)
        root, level = (new_pass(self._model, each, self._workspace) for each in (shape, below))
        return SearchLaunch(root, level, kind)

    def ready_sizes(self, num_segments: int) -> tuple[int, ...]:
        """Of passes that compute logits without taps; the same for all numbers of sequences that share a shape."""
        key = _round_up(num_segments, SEQUENCES), len(self._passes)
        if key not in self._ready:
            self._ready = {key: list_ready(key[0], self._passes)}
        return self._ready[key]

    def _detour(self, shape: Shape) -> Shape:
        """A larger shape that is ready, in place of one that is not; the shape itself once detours cost too much."""
        is_large = shape.num_rows > ROWS[-1]
        ready = find_ready(
            shape, [each for each, known in self._passes.items() if known.graph is not None or not is_large]
        )
        if ready is None or self._detours[shape] >= (MAX_LARGE_DETOURS if is_large else MAX_DETOURS):
            return shape
        self._detours[shape] += 1
        return ready

    def move_rows(self, sources: list[int], first: int) -> None:
        """Record moves for the next pass. Many moves, or moves that touch recorded ones, are applied at once."""
        if len(sources) > MAX_MOVES:
            self._move_now()
            self._cache.move_rows(sources, first)
            return
        targets = range(first, first + len(sources))
        touched = {*sources, *targets}
        if len(sources) + len(self._moves.sources) > MAX_MOVES or not self._touched.isdisjoint(touched):
            self._move_now()
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
            self._moves, self._touched = new_moves(), set()

    @torch.inference_mode()
    def _capture(self, known: CapturedPass[Pass]) -> CapturedPass[Pass]:
        """The pass with a graph, if there is a GPU."""
        if self._stream is None:
            return known
        return replace(known, graph=capture(known.work.launch, self._stream, self._device))

    @torch.inference_mode()
    def _first_run(self, shape: Shape, batch: PackedBatch) -> CapturedPass[Pass]:
        work = new_pass(self._model, shape, self._workspace)
        work.inputs.fill(batch, self._moves)
        return run_and_capture(work, self._stream if shape.num_rows <= ROWS[-1] else None, self._device)


def run_and_capture(work: PassT, stream: torch.cuda.Stream | None, device: torch.device) -> CapturedPass[PassT]:
    """Run a filled pass launch by launch, which compiles its kernels, then capture it on ``stream`` if there is one."""
    work.launch()
    graph = None if stream is None else capture(work.launch, stream, device)
    return CapturedPass(work, graph, PassOutput(work), new_event(device))


def count_rows(batch: PackedBatch) -> int:
    """Rows that a pass needs for the batch: more rows than nodes where a grown tree needs more ancestor words."""
    size = len(batch.token_ids)
    if len(batch.parents) == size:  # all trees are new
        return size
    grown = max([count_bits(segment) for segment in batch.segments if segment.after])
    return max(size, grown) if grown > MIN_WORDS * WORD_BITS else size


def find_ready(shape: Shape, ready: Iterable[Shape]) -> Shape | None:
    """The smallest of the ready shapes that can run the batches of ``shape``. Compiling kernels and capturing a graph
    takes so long that running requests should not wait for it."""
    is_large = shape.num_rows > ROWS[-1]
    most = MAX_LARGE_WASTE * shape.num_rows if is_large else min(MAX_WASTE * shape.num_rows, ROWS[-1])
    fitting = [
        other
        for other in ready
        if shape.num_rows <= other.num_rows <= most
        and other.num_sequences >= shape.num_sequences
        and other.num_logits >= shape.num_logits
        and (other.num_logits > 0) == (shape.num_logits > 0)
        and other.num_best >= shape.num_best
        and (other.taps, other.lane) == (shape.taps, shape.lane)
        and other.is_single <= shape.is_single
    ]
    return min(fitting, default=None)


def list_ready(num_sequences: int, ready: Iterable[Shape]) -> tuple[int, ...]:
    """Rows of the ready shapes for trees of this many sequences, ascending."""
    fitting = {
        shape.num_rows
        for shape in ready
        if shape.num_rows <= ROWS[-1]
        and shape.num_sequences >= min(num_sequences, shape.num_rows)
        and shape.num_logits == shape.num_rows
        and not (shape.taps or shape.is_single or shape.lane)
    }
    return tuple(sorted(fitting))


def _choose_shape(batch: PackedBatch, num_wanted: int, num_best: int, taps: tuple[int, ...]) -> Shape:
    num_rows = _round_up(count_rows(batch), ROWS)
    sizes = SEQUENCES if num_rows <= ROWS[-1] else LARGE_SEQUENCES
    num_sequences = min(_round_up(batch.num_segments, sizes), num_rows)
    return Shape(num_rows, num_sequences, _count_logits(num_rows, num_wanted), num_best, taps)


def _count_logits(num_rows: int, num_wanted: int) -> int:
    """Rows of logits that a pass computes if ``num_wanted`` are wanted."""
    if num_wanted == 0 or num_rows <= MAX_ROWS:
        return num_rows if num_wanted else 0
    if num_wanted <= FEW_LOGITS:
        return min(FEW_LOGITS, num_rows)
    return num_rows if num_rows <= ROWS[-1] else _round_up(num_wanted, LARGE_LOGITS)


def _round_up(size: int, sizes: Sequence[int]) -> int:
    """The next of the sizes, or the next multiple of LARGE_STEP beyond the last."""
    return sizes[bisect_left(sizes, size)] if size <= sizes[-1] else -(-size // LARGE_STEP) * LARGE_STEP
