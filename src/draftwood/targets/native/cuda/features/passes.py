"""Passes of a decoder with features: those of passes.py, with another beginning and another end.

Token and feature are joined by one kernel, and what a row leaves for those below it is put into its slot by another.
Layers, attention and the best entries are the same kernels as everywhere. A pass over text is *given* hidden states of
the larger model, and makes features of them first.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch

from draftwood.targets.native.cuda.features import rows as feature_rows
from draftwood.targets.native.cuda.features.weights import FeatureWeights
from draftwood.targets.native.cuda.kernels import block_size, launch_top_rows, rows
from draftwood.targets.native.cuda.passes import Model, NarrowPass, Pass, Shape, WidePass
from draftwood.targets.native.cuda.products import HEAD_BLOCK, MOST_ROWS, Heads, Kind, Product
from draftwood.targets.native.cuda.workspace import Workspace
from draftwood.targets.native.quantize import to_dense


class FeatureModel(NamedTuple):
    """What all passes share."""

    model: Model
    how: FeatureWeights
    left: torch.Tensor  # [slots, H] the features that rows have left


class FeatureShape(NamedTuple):
    shape: Shape
    is_given: bool  # whether features of rows are made of given hidden states


class FeaturePass(Pass):
    """``inputs`` is filled, with the slots of the rows' features in the place of moves, of which there are none; what
    is given is copied to ``given``; the rest is as in every pass."""

    def __init__(self, features: FeatureModel, wanted: FeatureShape, workspace: Workspace) -> None:
        how, left = features.how, features.left
        self._how = how
        self._left = left
        super().__init__(features.model, wanted.shape, workspace)
        num_rows = wanted.shape.num_rows
        self._joined = left.new_zeros(num_rows, how.joined_size)
        self.given = left.new_zeros(num_rows, how.tap_size) if wanted.is_given else None

    def launch(self) -> None:
        how, inputs, overlap = self._how, self.inputs, self._model.overlap
        weights = self._model.weights
        states = self._buffers.hidden.states
        inputs.send()
        feature_rows.join(
            inputs.ids, inputs.moves, weights.embed, self._left,
            None if self.given is None else how.fuse(self.given),
            None if how.feature_norm is None else (weights.layers[0].input_norm, how.feature_norm),
            self._joined, states, how.config.norm_eps, keeps_normed=how.keeps_normed,
        )  # fmt: skip
        next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            if index:
                self._project(index, layer)
            else:
                self._project_first()
            self._attend(index, layer)
            self._finish(layer, next_norm)
        norm = weights.norm if how.leaves_normed else None
        feature_rows.leave(states, norm, inputs.slots, self._left, how.norm_eps, pdl=overlap)
        if self._shape.num_logits:
            known = self._head()
            launch_top_rows(self.logits, self._shape.num_best, self._words, self._peaks, peaks_known=known, pdl=overlap)
            self._answer.copy_(self._words, non_blocking=True)

    @abstractmethod
    def _project_first(self) -> None:
        """Token and feature to queries, keys and values; by way of hidden states if there is an ``fc``."""


class NarrowFeaturePass(FeaturePass, NarrowPass):
    def _prepare(self) -> tuple[int, int]:
        demand = super()._prepare()
        how, config = self._how, self._how.config
        width, qkv = config.hidden_size, config.q_size + 2 * config.kv_size

        def product(
            num_in: int, num_out: int, kind: Kind = Kind.PLAIN, eps: float = 0.0, heads: Heads | None = None
        ) -> Product:
            dtype = self._left.dtype
            return Product(
                num_in, num_out, self._shape.num_rows, self._model.gpu, kind, heads=heads,
                dtype=dtype, weight_bytes=dtype.itemsize, eps=eps, pdl=self._model.overlap,
            )  # fmt: skip

        self._fc = product(how.joined_size, width)
        self._first_qkv = product(how.joined_size if how.fc is None else width, qkv, heads=self._heads)
        self._logits = product(width, config.vocab_size, Kind.HEAD, how.norm_eps)
        demands = [demand, self._fc.scratch, self._first_qkv.scratch]
        return max(floats for floats, _ in demands), max(counters for _, counters in demands)

    def _project_first(self) -> None:
        how, first = self._how, self._model.weights.layers[0]
        parts, counters = self._parts, self._counters
        x = self._joined
        if how.fc is not None:
            x = self._buffers.hidden.states
            self._fc.launch(self._joined, how.fc, x, bias=how.fc_bias, parts=parts, counters=counters)
        self._first_qkv.launch(
            x, first.qkv, self._buffers.qkv,
            bias=first.qkv_bias, turned=self._turned(0, first) if self._heads else None, parts=parts, counters=counters,
        )  # fmt: skip

    def _head(self) -> bool:
        if self._how.has_norm:
            return super()._head()
        notes = block_size(self._how.config.vocab_size) == HEAD_BLOCK
        peaks = self._peaks if notes else None
        self._logits.launch(self._buffers.hidden.states, self._model.weights.head, self.logits, peaks=peaks)
        return notes


class WideFeaturePass(FeaturePass, WidePass):
    def _project_first(self) -> None:
        how, first = self._how, self._model.weights.layers[0]
        x = self._joined
        if how.fc is not None:
            x = self._buffers.hidden.states
            _multiply(self._joined, how.fc, how.fc_bias, x)
        _multiply(x, to_dense(first.qkv, x.dtype), first.qkv_bias, self._buffers.qkv)

    def _head(self) -> bool:
        how, weights, states, normed = self._how, self._model.weights, self._buffers.hidden.states, self._buffers.normed
        if how.has_norm:
            rows.norm_rows(states, weights.norm, normed, how.norm_eps, pdl=False)
        index = self.inputs.wanted[: self._shape.num_logits]
        torch.index_select(normed if how.has_norm else states, 0, index, out=self._wanted)
        head = to_dense(weights.head, states.dtype)
        if head.is_cuda:
            torch.mm(self._wanted, head.t(), out_dtype=torch.float32, out=self.logits)
        else:
            torch.mm(self._wanted.float(), head.float().t(), out=self.logits)
        return False


def new_feature_pass(features: FeatureModel, wanted: FeatureShape, workspace: Workspace) -> FeaturePass:
    kind = NarrowFeaturePass if wanted.shape.num_rows <= MOST_ROWS else WideFeaturePass
    return kind(features, wanted, workspace)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
