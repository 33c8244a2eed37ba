"""Searches of a draft model without the host between passes: kernels/pick.py picks the nodes of the next one.

Pass 0 reads text and predicts what follows each tree's root, its last token. It is one graph, and every pass after it
is a replay of a second one, whatever the number of passes. The host reads all that was found at the end. A search that
stops by itself is looked at where the last one would have stopped: until then passes follow each other, from then on
the host waits for each.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, Self, TypeVar

import numpy as np
import torch
import triton

from draftwood.targets.native.cuda.attention import MIN_WORDS, WORD_BITS
from draftwood.targets.native.cuda.common import launch_options
from draftwood.targets.native.cuda.device import capture, new_event, record
from draftwood.targets.native.cuda.inputs import NO_SLOT
from draftwood.targets.native.cuda.kernels import LIMITS, pick_nodes
from draftwood.targets.native.cuda.passes import Pass
from draftwood.targets.searches import Found, SearchPlan

MAX_RUN = (MIN_WORDS - 1) * WORD_BITS  # nodes below a root: each needs a bit in the ancestor words of the smallest pass
MAX_WIDTH = WORD_BITS
LANES_PER_WARP = 256
MAX_WARPS = 8
NOT_PICKED = -1

PassT = TypeVar("PassT", bound=Pass)
ShapeT = TypeVar("ShapeT", bound=Hashable)


class GraphKind(NamedTuple):
    """What is the same in all launches of two graphs."""

    num_trees: int  # at most
    width: int
    best: int
    anywhere: bool
    is_fixed: bool

    @classmethod
    def of(cls, plan: SearchPlan, num_trees: int) -> Self:
        return cls(num_trees, plan.width, plan.best, plan.anywhere, plan.is_fixed)


def fits(plan: SearchPlan) -> bool:
    """Whether the nodes of a plan have room in ancestor words."""
    return plan.width <= MAX_WIDTH and plan.passes * plan.width <= MAX_RUN


class SearchLaunch(Generic[PassT]):
    """``root`` reads the text, ``level`` is run again for each pass after it."""

    def __init__(self, root: PassT, level: PassT, kind: GraphKind, vocabulary: torch.Tensor | None = None) -> None:
        """``vocabulary``: token of the target by token of the draft model; None: they are the same."""
        device, pinned = level.inputs.ids.device, level.inputs.ids.is_cuda
        trees, width, group = kind.num_trees, kind.width, kind.width * kind.best
        self.root, self._level, self._kind, self._vocabulary = root, level, kind, vocabulary
        self._num_records = MAX_RUN // width + 2  # a pick follows the last pass too
        num_nodes = self._num_nodes = self._num_records * width
        # One record per pass: tokens, probs and values of its candidates, picks and depths of its nodes, for all trees.
        sizes = [trees * group] * 3 + [trees * width] * 2
        self._found = torch.zeros(self._num_records, sum(sizes), dtype=torch.int32, device=device)
        self._found[0, -2 * trees * width : -trees * width] = NOT_PICKED
        self._answer = torch.zeros(self._found.shape, dtype=torch.int32, pin_memory=pinned)
        self._answer_array = self._answer.numpy()
        tokens, probs, paths, picks, depths = torch.split(self._found, sizes, dim=1)
        self._parts = tokens, probs.view(torch.float32), paths.view(torch.float32), picks, depths
        self._values = torch.ones(trees, num_nodes, device=device)  # that of the root stays
        self._left = torch.zeros(self._found.shape, device=device) if kind.anywhere else self._values
        self._num_words = -(-num_nodes // WORD_BITS)
        self._ancestors = torch.zeros(trees * num_nodes * self._num_words, dtype=torch.int32, device=device)
        numbers = torch.arange(trees, dtype=torch.int32, device=device)
        self._word_rows = numbers if root.selects_rows else root.inputs.wanted  # of the roots, in the words of ``root``
        self._turns = torch.zeros(trees, dtype=torch.int32, device=device)
        self._sums = torch.zeros(self._num_records, trees, device=device)
        self._host_sums = torch.zeros(self._sums.shape, pin_memory=pinned)
        # Number of trees, their limits, their picks if these are fixed.
        order = [1, trees * LIMITS, trees * num_nodes * kind.is_fixed]
        self._host_order = torch.zeros(sum(order), dtype=torch.int32, pin_memory=pinned)
        self._order = torch.zeros(sum(order), dtype=torch.int32, device=device)
        self._count, self._limits, self._fixed = torch.split(self._order, order)
        self._host_count, self._host_limits, self._host_fixed = [
            part.numpy() for part in torch.split(self._host_order, order)
        ]
        self._needed: dict[float, int] = {}  # by threshold: passes of the last search that stopped by itself
        self._done = new_event(device)
        self._graphs: tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph] | None = None
        self._plan: SearchPlan | None = None  # of the search that runs
        self._num_run = 0  # of its passes below the roots, launched so far
        level.inputs.slots.fill_(NO_SLOT)  # of padding rows
        level.inputs.wanted.copy_(torch.arange(len(level.inputs.wanted)))
        if self._has_features:
            level.inputs.moves[0] = trees * width

    def run(self, plan: SearchPlan, stream: torch.cuda.Stream | None) -> list[Found]:
        """The inputs of ``root`` are filled. Captures the graphs on ``stream``, if there is one, after a first run."""
        self.start(plan)
        return self.finish(stream)

    def start(self, plan: SearchPlan) -> None:
        """Launch the passes that are known to be needed. Does not wait."""
        if self._plan is not None:
            self._wait()  # nobody wanted the last search, which may still read its order
        self._plan, self._num_run = plan, 0
        self._write_order(plan)
        if self._graphs is None:
            self._launch_root()
        else:
            self._graphs[0].replay()
        ahead = plan.passes if plan.threshold is None else min(self._needed.get(plan.threshold, 0), plan.passes)
        for _ in range(ahead):
            self._run_level()
        self._send_answer()

    def finish(self, stream: torch.cuda.Stream | None) -> list[Found]:
        """Wait for the search that was started, and run the passes that it still needs."""
        plan, self._plan = self._plan, None
        assert plan is not None
        self._wait()
        if plan.threshold is not None:
            while self._num_run < plan.passes and self._worth(plan, self._num_run)[-1]:
                self._run_level()
                self._send_answer()
                self._wait()
            stops = np.flatnonzero(~self._worth(plan, self._num_run))
            self._needed[plan.threshold] = int(stops[0]) if len(stops) else self._num_run
        found = self._read(len(plan.limits), self._num_run)
        if self._graphs is None and stream is not None:
            device = self._found.device
            if not self._num_run:
                self._launch_level()  # which compiles its kernels; nobody reads what it finds
            self._graphs = capture(self._launch_root, stream, device), capture(self._launch_level, stream, device)
        return found

    def _run_level(self) -> None:
        if self._graphs is None:
            self._launch_level()
        else:
            self._graphs[1].replay()
        self._num_run += 1

    def _send_answer(self) -> None:
        end = self._num_run + 1
        self._answer[:end].copy_(self._found[:end], non_blocking=True)
        if self._done is not None:
            record(self._done, self._found.device)

    def _wait(self) -> None:
        if self._done is not None:
            self._done.synchronize()

    def _worth(self, plan: SearchPlan, num_run: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """For each pass below the roots, and the one after the last: whether it is worth it for one of the trees."""
        best = self._host_sums.numpy()[1 : num_run + 2, : len(plan.limits)].max(axis=1)  # [passes]
        found: np.ndarray[tuple[int], np.dtype[np.bool_]] = (best > 0.0) & (best >= (plan.threshold or 0.0))
        return found

    def _write_order(self, plan: SearchPlan) -> None:
        self._host_count[0] = len(plan.limits)
        self._host_limits[: len(plan.limits) * LIMITS] = [part for limits in plan.limits for part in limits[:LIMITS]]
        if plan.is_fixed:
            rows = self._host_fixed.reshape(-1, self._num_nodes)
            rows[:] = NOT_PICKED
            for row, limits in zip(rows, plan.limits, strict=False):
                row[: len(limits.picks)] = limits.picks

    def _read(self, num_trees: int, num_run: int) -> list[Found]:
        """One search per tree, of all passes together."""
        kind, records = self._kind, self._answer_array[: num_run + 1]
        return [Found(records, kind.num_trees, tree, kind.width, kind.best) for tree in range(num_trees)]

    # -- launches ----------------------------------------------------------------------------------------------------

    def _launch_root(self) -> None:
        self._order.copy_(self._host_order, non_blocking=True)
        self.root.send()
        self.root.compute()
        self._launch_pick(self.root, is_first=True)

    def _launch_level(self) -> None:
        self._level.compute()
        self._launch_pick(self._level, is_first=False)

    def _launch_pick(self, last: Pass, *, is_first: bool) -> None:
        kind, root, inputs = self._kind, self.root.inputs, self._level.inputs
        width, group, per_tile = kind.width, kind.width * kind.best, self._level.nodes_per_tile
        row_words, tiles = inputs.words.shape[1], -(-width // per_tile)
        lanes = triton.next_power_of_2((self._num_records - 1) * group if kind.anywhere else group)
        pick_nodes[(kind.num_trees,)](
            last.words, self._word_rows, root.wanted, root.slots, root.positions, self._count, self._limits,
            self._fixed, self._vocabulary,
            *self._parts, self._values, self._left, self._ancestors, self._sums, self._turns,
            inputs.ids, inputs.positions, inputs.slots, inputs.afters, inputs.moves, inputs.tiles, inputs.words,
            self._found.shape[1],
            WIDTH=width, BEST=kind.best, STRIDE=last.words.shape[1],
            NODES=self._num_nodes, WORDS=self._num_words, ROW_WORDS=row_words, PER_TILE=per_tile, TILES=tiles,
            IS_FIRST=is_first, IS_ANYWHERE=kind.anywhere, IS_FIXED=kind.is_fixed,
            MAPPED=self._vocabulary is not None, FEATURES=self._has_features, PDL=last.pdl,
            LANES=lanes, PLACES=triton.next_power_of_2(width),
            WORD_LANES=triton.next_power_of_2(max(row_words, self._num_words)),
            TILE_LANES=triton.next_power_of_2(tiles),
            num_warps=min(max(lanes // LANES_PER_WARP, 4), MAX_WARPS), **launch_options(last.pdl),
        )  # fmt: skip
        if kind.anywhere:
            self._host_sums.copy_(self._sums, non_blocking=True)

    @property
    def _has_features(self) -> bool:
        """Whether moves of inputs are the slots of features."""
        return self._level.reads_features


class KnownSearches(Generic[PassT]):
    """The launches that were made, the latest ones only."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_made = 0
        self.launches: OrderedDict[tuple[Hashable, GraphKind], SearchLaunch[PassT]] = OrderedDict()

    def find(
        self, shape: ShapeT, kind: GraphKind, make: Callable[[ShapeT, GraphKind], SearchLaunch[PassT]]
    ) -> SearchLaunch[PassT]:
        """The launch whose root pass has this shape."""
        key = shape, kind
        if key not in self.launches:
            self.num_made += 1
            self.launches[key] = make(shape, kind)
            while len(self.launches) > self._most:
                self.launches.popitem(last=False)
        self.launches.move_to_end(key)
        return self.launches[key]
