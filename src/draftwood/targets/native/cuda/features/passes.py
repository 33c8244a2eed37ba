"""Passes of a feature decoder: the passes of passes.py with another first and last step.

One kernel joins token and feature. Another stores each row's output as the feature of its children, in the row's slot.
Layers, attention and top entries use the same kernels as every pass. A pass over text is *given* hidden states of the
target and computes features from them first.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftwood.targets.base import DeviceAnswer
from draftwood.targets.native.cuda.features import rows as feature_rows
from draftwood.targets.native.cuda.features.weights import FeatureWeights
from draftwood.targets.native.cuda.kernels import follow_path, rows
from draftwood.targets.native.cuda.passes import Model, NarrowPass, Pass, Shape, WidePass
from draftwood.targets.native.cuda.products import MAX_ROWS, Kind
from draftwood.targets.native.cuda.workspace import Workspace
from draftwood.targets.native.quantize import to_dense
from draftwood.targets.native.weights import Weights


class FeatureModel(NamedTuple):
    """State shared by all passes of a feature decoder."""

    model: Model
    features: FeatureWeights
    feature_cache: torch.Tensor  # [slots, H] the features that rows have stored
    narrow_weights: Weights  # of passes with few rows, which take as long as the weights take to load


class FeatureShape(NamedTuple):
    shape: Shape
    is_given: bool  # whether features are computed from given hidden states
    is_fed: bool = False  # whether ``FeaturePass.follow`` writes the inputs, on the device


class FeaturePass(Pass):
    """A pass whose ``inputs.moves`` holds the slots of the rows' features, since it moves no cache rows.

    Given hidden states are gathered in the pass, from addresses that ``point_to`` or ``follow`` has set.
    """

    reads_features = True

    def __init__(self, model: FeatureModel, wanted: FeatureShape, workspace: Workspace) -> None:
        features, feature_cache = model.features, model.feature_cache
        self._features = features
        self._feature_cache = feature_cache
        super().__init__(model.model, wanted.shape, workspace)
        num_rows = wanted.shape.num_rows
        self._joined = feature_cache.new_zeros(num_rows, features.joined_size)
        self._given = feature_cache.new_zeros(num_rows, features.tap_size) if wanted.is_given else None
        self.is_fed, device = wanted.is_fed, feature_cache.device
        on_gpu = device.type == "cuda"
        # Those from the host are read by one kernel, where they are: a copy to the device would take longer.
        self._host_addresses = torch.zeros(num_rows, dtype=torch.int64, pin_memory=on_gpu)
        self._address_array = self._host_addresses.numpy()
        self._addresses = self._host_addresses.to(device) if self.is_fed else self._host_addresses
        self._told = torch.zeros(1 + num_rows, dtype=torch.int32, device=device)
        self._host_told = torch.zeros(1 + num_rows, dtype=torch.int32, pin_memory=on_gpu)

    def point_to(self, rows: slice, states: torch.Tensor, state_rows: Sequence[int]) -> None:
        """Use ``state_rows`` of ``states [any, T]`` for these rows. They must stay there until the pass has run."""
        assert self._given is not None
        assert states.dtype == self._given.dtype
        first, step = states.data_ptr(), states.stride(0) * states.element_size()
        self._address_array[rows] = [first + step * row for row in state_rows]

    def follow(self, answer: DeviceAnswer, base: int, length: int) -> None:
        """Read the tokens along the path that a tree's pass accepts, which continue a sequence of ``length`` positions
        from slot ``base`` on. To be called while the device runs that pass; does not wait."""
        follow_path(answer, base, length, self.inputs, self._addresses, self._told)

    @property
    def followed(self) -> list[int] | None:
        """The tokens that were read; None if there was no room for all. The pass must have finished."""
        count, *tokens = self._host_told.tolist()
        return tokens[:count] if count <= len(tokens) else None

    def send(self) -> None:
        if self.is_fed:
            self._host_told.copy_(self._told, non_blocking=True)
        else:
            super().send()

    def compute(self) -> None:
        features, inputs, weights = self._features, self.inputs, self._model.weights
        states = self._buffers.hidden.states
        if self._given is not None:
            feature_rows.gather_states(self._addresses, inputs.moves, self._given)
        feature_rows.join_features(
            inputs.ids, inputs.moves, weights.embed, self._feature_cache,
            None if self._given is None else features.fuse(self._given),
            None if features.feature_norm is None else (weights.layers[0].input_norm, features.feature_norm),
            self._joined, states, features.config.norm_eps, norm_before_residual=features.norm_before_residual,
        )  # fmt: skip
        next_norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.norm]
        for index, (layer, next_norm) in enumerate(zip(weights.layers, next_norms, strict=True)):
            if index:
                self._project(index, layer)
            else:
                self._project_first()
            self._attend(index, layer)
            self._finish(layer, next_norm)
        norm = weights.norm if features.norm_output else None
        feature_rows.store_features(
            states, norm, inputs.slots, self._feature_cache, features.norm_eps, pdl=self._model.pdl
        )
        self._launch_logits()

    @abstractmethod
    def _project_first(self) -> None:
        """Compute queries, keys and values of layer 0 from token and feature, through ``fc`` if there is one."""


class NarrowFeaturePass(FeaturePass, NarrowPass):
    def _prepare(self) -> tuple[int, int]:
        demand = super()._prepare()
        features, config, weights = self._features, self._features.config, self._model.weights
        width, qkv, joined = config.hidden_size, config.q_size + 2 * config.kv_size, features.joined_size
        first, product = weights.layers[0].qkv, self._new_product
        self._first_qkv = product(first, joined if features.fc is None else width, qkv, heads=self._heads)
        self._logits = product(weights.head, width, config.vocab_size, Kind.HEAD, eps=features.norm_eps)
        scratch = [demand, self._first_qkv.scratch]
        if features.fc is not None:
            self._fc = product(features.fc, joined, width)
            scratch.append(self._fc.scratch)
        floats, counters = map(max, *scratch)
        return floats, counters

    def _project_first(self) -> None:
        features, first = self._features, self._model.weights.layers[0]
        parts, counters = self._parts, self._counters
        x = self._joined
        if features.fc is not None:
            x = self._buffers.hidden.states
            self._fc.launch(self._joined, features.fc, x, bias=features.fc_bias, parts=parts, counters=counters)
        self._first_qkv.launch(
            x, first.qkv, self._buffers.qkv,
            bias=first.qkv_bias, cache_write=self._cache_write(0, first) if self._heads else None,
            parts=parts, counters=counters,
        )  # fmt: skip

    def _head(self) -> bool:
        if self._features.has_norm:
            return super()._head()
        peaks = self._head_peaks
        self._logits.launch(self._buffers.hidden.states, self._model.weights.head, self.logits, peaks=peaks)
        return peaks is not None


class WideFeaturePass(FeaturePass, WidePass):
    def _project_first(self) -> None:
        features, first = self._features, self._model.weights.layers[0]
        x = self._joined
        if features.fc is not None:
            x = self._buffers.hidden.states
            self._multiply(self._joined, features.fc, features.fc_bias, x)
        self._multiply(x, to_dense(first.qkv, x.dtype), first.qkv_bias, self._buffers.qkv)

    def _head(self) -> bool:
        features, weights = self._features, self._model.weights
        states, normed = self._buffers.hidden.states, self._buffers.normed
        if features.has_norm:
            rows.norm_rows(states, weights.norm, normed, features.norm_eps, pdl=False)
        index = self.inputs.wanted[: self._shape.num_logits]
        torch.index_select(normed if features.has_norm else states, 0, index, out=self._wanted)
        self._write_logits(self._wanted, to_dense(weights.head, states.dtype), self.logits)
        return False


def new_feature_pass(model: FeatureModel, wanted: FeatureShape, workspace: Workspace) -> FeaturePass:
    if wanted.shape.num_rows > MAX_ROWS:
        return WideFeaturePass(model, wanted, workspace)
    narrow = model.model._replace(weights=model.narrow_weights)
    return NarrowFeaturePass(model._replace(model=narrow), wanted, workspace)
