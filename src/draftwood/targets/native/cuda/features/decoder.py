"""Runs a feature decoder on a GPU: passes of a few fixed shapes, each captured as a graph at first use.

A pass takes as long as its weights take to load, whether it has one row or sixteen, so there are few shapes. Drafting a
tree for one request needs two graphs: one for the text that it starts from and one for all levels below.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftwood.targets.base import DeviceAnswer
from draftwood.targets.cache import KVCache
from draftwood.targets.native.cuda.decoder import CapturedPass, count_rows, run_and_capture
from draftwood.targets.native.cuda.device import (
    build_rotation_table,
    describe_gpu,
    new_stream,
    on_device,
    record,
    supports_pdl,
)
from draftwood.targets.native.cuda.features.passes import FeatureModel, FeaturePass, FeatureShape, new_feature_pass
from draftwood.targets.native.cuda.features.weights import MAX_FEATURES, FeatureWeights, in_8_bits
from draftwood.targets.native.cuda.inputs import Moves
from draftwood.targets.native.cuda.kernels import GIVEN, MAX_FOLLOWED
from draftwood.targets.native.cuda.passes import Model, Shape
from draftwood.targets.native.cuda.products import MAX_ROWS
from draftwood.targets.native.cuda.searches import GraphKind, KnownSearches, SearchLaunch, fits
from draftwood.targets.native.cuda.workspace import Workspace
from draftwood.targets.native.decoder import PackedBatch
from draftwood.targets.searches import Found, SearchPlan
from draftwood.targets.toprows import MAX_TOP_K, TopRows

ROWS = (16, 32, 64, 128, 256, MAX_FEATURES)  # sizes of passes
BEST = (1, 10, 32, MAX_TOP_K)  # top entries per row: for chains, for trees, for drawn trees
MAX_PASSES = 48  # kept at once


class GivenStates(NamedTuple):
    """Hidden states of the target for the rows of a segment."""

    states: torch.Tensor  # [any, T]
    rows: Sequence[int]  # [n] of ``states``


Given = Sequence[GivenStates | None]  # per segment; None: its parents were run before


class FeatureDecoder:
    def __init__(
        self,
        features: FeatureWeights,
        cache: KVCache,
        feature_cache: torch.Tensor,
        vocabulary: torch.Tensor | None = None,
        *,
        quantize: bool = False,
    ) -> None:
        """``feature_cache [slots, H]`` stores the rows' features, by the slots of the KV cache.

        ``vocabulary``: token of the target by token of the head; None: they are the same. ``quantize``: passes over few
        rows read large matrices in 8 bits.
        """
        dtype, device, config = feature_cache.dtype, feature_cache.device, features.config
        self._device = device
        self._vocab_size = config.vocab_size
        self._workspace = Workspace(config, dtype, device)
        rotation = build_rotation_table(config, cache.num_slots, dtype, device)
        model = Model(config, features.weights, cache, rotation, describe_gpu(device), supports_pdl(device))
        narrow = in_8_bits(features.weights) if quantize else features.weights
        self._model = FeatureModel(model, features, feature_cache, narrow)
        self._vocabulary = None if vocabulary is None else vocabulary.to(device, torch.int32)
        self._has_window = bool(config.sliding_window)
        self._passes: OrderedDict[FeatureShape, CapturedPass[FeaturePass]] = OrderedDict()
        self._searches = KnownSearches[FeaturePass](MAX_PASSES)
        self._stream = new_stream(device)  # for graph capture
        self._num_captured = 0

    @property
    def num_prepared(self) -> int:
        return self._num_captured + self._searches.num_made

    def shape_for(self, batch: PackedBatch, given: Given, k: int) -> FeatureShape | None:
        """The shape that the batch runs in; None if it exceeds all shapes."""
        size = count_rows(batch)
        num_best = min(k, self._vocab_size)
        if size > ROWS[-1] or num_best > BEST[-1]:
            return None
        num_rows = ROWS[bisect_left(ROWS, size)]
        num_best = min(BEST[bisect_left(BEST, num_best)], self._vocab_size)
        num_sequences = 1 << (batch.num_segments - 1).bit_length()
        num_logits = 0
        if batch.num_wanted:
            num_logits = num_rows if num_rows <= MAX_ROWS else ROWS[bisect_left(ROWS, batch.num_wanted)]
        is_given = any(states is not None for states in given)
        return FeatureShape(Shape(num_rows, num_sequences, num_logits, num_best), is_given)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, given: Given, k: int, shape: FeatureShape) -> TopRows:
        """Run a pass and wait for it. Writes keys, values and features of all rows.

        Returns the top ``k`` entries of the wanted rows, as ids of the head's vocabulary.
        """
        known = self._passes.get(shape)
        with on_device(self._device):
            if known is None:
                self._num_captured += 1
                work = new_feature_pass(self._model, shape, self._workspace)
                _fill(work, batch, given)
                known = self._passes[shape] = run_and_capture(work, self._stream, self._device)
                while len(self._passes) > MAX_PASSES:
                    self._passes.popitem(last=False)
            else:
                _fill(known.work, batch, given)
                known.run()
                self._passes.move_to_end(shape)
            if known.done is not None:
                record(known.done, self._device)
                known.done.synchronize()
        rows = batch.logit_rows()
        return known.output.best.at(range(len(rows)) if known.work.selects_rows else rows).first(k)

    def can_grow(self, plan: SearchPlan) -> bool:
        """Whether a search fits the largest pass and the ancestor words of the smallest."""
        return (
            not self._has_window
            and fits(plan)
            and (1 << (len(plan.limits) - 1).bit_length()) * plan.width <= ROWS[-1]
            and plan.best <= min(BEST[-1], self._vocab_size)
        )

    @torch.inference_mode()
    def grow(self, batch: PackedBatch, given: Given, plan: SearchPlan, shape: FeatureShape) -> list[Found]:
        """Run a pass over text, whose segments end with a root each, and the passes of a search below them; wait for
        all. Writes keys, values and features of all rows; those of the search follow the text.
        """
        kind = GraphKind.of(plan, shape.shape.num_sequences)
        with on_device(self._device):
            launch = self._searches.find(shape, kind, self._new_search)
            _fill(launch.root, batch, given)
            return launch.run(plan, self._stream)

    @torch.inference_mode()
    def start_ahead(
        self, answer: DeviceAnswer, base: int, length: int, plan: SearchPlan
    ) -> SearchLaunch[FeaturePass] | None:
        """Queue a search right after the target's pass over a tree, which the device is still running. It begins below
        the path that the pass accepts, which continues a sequence of ``length`` positions from slot ``base`` on. Does
        not wait. None if the tree is too large."""
        if len(answer.ids) > MAX_FOLLOWED or answer.taps.dtype != self._model.feature_cache.dtype:
            return None
        best = min(BEST[bisect_left(BEST, plan.best)], self._vocab_size)
        shape = FeatureShape(Shape(ROWS[0], 1, ROWS[0], best), is_given=True, is_fed=True)
        with on_device(self._device):
            launch = self._searches.find(shape, GraphKind.of(plan, 1), self._new_search)
            launch.root.follow(answer, base, length)
            launch.start(plan)
        return launch

    @torch.inference_mode()
    def finish_ahead(self, launch: SearchLaunch[FeaturePass]) -> tuple[list[int] | None, Found]:
        """Wait for such a search. Returns the text that it has read, if there was room for it, and what it found."""
        with on_device(self._device):
            (found,) = launch.finish(self._stream)
            return launch.root.followed, found

    def _new_search(self, shape: FeatureShape, kind: GraphKind) -> SearchLaunch[FeaturePass]:
        num_rows = ROWS[bisect_left(ROWS, kind.num_trees * kind.width)]
        below = FeatureShape(Shape(num_rows, kind.num_trees, num_rows, shape.shape.num_best), is_given=False)
        root, level = (new_feature_pass(self._model, each, self._workspace) for each in (shape, below))
        return SearchLaunch(root, level, kind, self._vocabulary)


def _fill(work: FeaturePass, batch: PackedBatch, given: Given) -> None:
    """Write the inputs of a pass on the host. Given states stay where they are until it has run."""
    sources = array("i")
    for segment, states in zip(batch.segments, given, strict=True):
        if states is None:
            first = segment.base + segment.prefix_len
            sources.extend([first + parent for parent in segment.parents[segment.after :]])
        else:
            sources.extend([GIVEN] * segment.size)
            work.point_to(segment.rows, *states)
    work.inputs.fill(batch, Moves(sources, sources))
