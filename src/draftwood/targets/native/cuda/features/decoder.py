"""Runs a decoder with features on a GPU: passes of a few fixed shapes, each captured as a graph at its first use.

A pass takes what its weights take to arrive, whether it has one row or sixteen, so there are few shapes: a draft in a
tree of one request comes along with two graphs, one for the text that it begins with and one for all levels below.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import torch

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
from draftwood.targets.native.cuda.features.passes import FeatureModel, FeaturePass, FeatureShape, new_feature_pass
from draftwood.targets.native.cuda.features.weights import MOST_FEATURES, FeatureWeights
from draftwood.targets.native.cuda.inputs import Moves
from draftwood.targets.native.cuda.passes import Model, Shape
from draftwood.targets.native.cuda.products import MOST_ROWS
from draftwood.targets.native.cuda.workspace import Workspace
from draftwood.targets.native.decoder import PackedBatch
from draftwood.targets.toprows import MAX_TOP_K, TopRows

ROWS = (16, 32, 64, 128, MOST_FEATURES)  # that passes are made for
BEST = (1, 10, 32, MAX_TOP_K)  # entries of a row that passes find: those of chains, of trees, of drawn trees
KEPT_PASSES = 48
GIVEN = -1  # instead of a slot: the feature is made of what was given

Given = Sequence[torch.Tensor | None]  # for each segment hidden states [n, T], or None: below rows that were run


class Captured(NamedTuple):
    work: FeaturePass
    best: TopRows  # views of the pass's answer
    graph: torch.cuda.CUDAGraph | None  # None: launched one by one
    done: torch.cuda.Event | None  # has happened when the answer is on the host; None: at once


class FeatureDecoder:
    def __init__(self, how: FeatureWeights, cache: KVCache, left: torch.Tensor) -> None:
        """``left [slots, H]``: where the rows' features are kept, by the slots of the cache."""
        dtype, device, config = left.dtype, left.device, how.config
        self._device = device
        self._workspace = Workspace(config, dtype, device)
        rotation = rotation_table(config, cache.num_slots, dtype, device)
        model = Model(config, how.weights, cache, rotation, gpu_of(device), can_overlap(device))
        self._features = FeatureModel(model, how, left)
        self._passes: OrderedDict[FeatureShape, Captured] = OrderedDict()
        self._stream = new_stream(device)  # that graphs are captured on

    def shape_for(self, batch: PackedBatch, given: Given, k: int) -> FeatureShape | None:
        """What the batch runs in; None if it is larger than all shapes."""
        size = len(batch.token_ids)
        grown = max([bits_needed(segment) for segment in batch.segments if segment.after], default=0)
        if grown > LEAST_WORDS * WORD_BITS:  # more rows have more ancestor words
            size = max(size, grown)
        num_best = min(k, self._features.how.config.vocab_size)
        if size > ROWS[-1] or num_best > BEST[-1]:
            return None
        num_rows = ROWS[bisect_left(ROWS, size)]
        num_best = min(BEST[bisect_left(BEST, num_best)], self._features.how.config.vocab_size)
        num_sequences = 1 << (len(batch.segments) - 1).bit_length()
        num_wanted = sum([segment.num_logits for segment in batch.segments])
        num_logits = 0
        if num_wanted:
            num_logits = num_rows if num_rows <= MOST_ROWS else ROWS[bisect_left(ROWS, num_wanted)]
        is_given = any(states is not None for states in given)
        return FeatureShape(Shape(num_rows, num_sequences, num_logits, num_best), is_given)

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, given: Given, k: int, shape: FeatureShape) -> TopRows:
        """Writes keys, values and features of all rows; the ``k`` best entries of the wanted ones, in the head's
        vocabulary. Waits for them."""
        known = self._passes.get(shape)
        with on_device(self._device):
            if known is None:
                known = self._passes[shape] = self._first_run(shape, batch, given)
                while len(self._passes) > KEPT_PASSES:
                    self._passes.popitem(last=False)
            else:
                _fill(known.work, batch, given)
                if known.graph is not None:
                    known.graph.replay()
                else:
                    known.work.launch()
                self._passes.move_to_end(shape)
            if known.done is not None:
                known.done.record()
                known.done.synchronize()
        rows = batch.logit_rows()
        return known.best.at(range(len(rows)) if known.work.selects_rows else rows).first(k)

    def _first_run(self, shape: FeatureShape, batch: PackedBatch, given: Given) -> Captured:
        """Launch by launch; captures the pass behind that."""
        work = new_feature_pass(self._features, shape, self._workspace)
        _fill(work, batch, given)
        work.launch()
        graph = None if self._stream is None else capture(work.launch, self._stream, self._device)
        return Captured(work, work.best(), graph, new_event(self._device))


def _fill(work: FeaturePass, batch: PackedBatch, given: Given) -> None:
    """What the pass reads: the plan on the host, given states on the device."""
    sources = array("i")
    for segment, states in zip(batch.segments, given, strict=True):
        if states is None:
            first = segment.base + segment.prefix_len
            sources.extend([first + parent for parent in segment.parents[segment.after :]])
        else:
            assert work.given is not None
            sources.extend([GIVEN] * segment.size)
            work.given[segment.rows].copy_(states, non_blocking=True)
    work.inputs.fill(batch, Moves(sources, sources))
