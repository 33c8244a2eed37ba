"""A draft head as one C call per pass: a small decoder whose rows are a token and a feature."""

from functools import partial

import numpy as np
import torch

from draftwood.models import ModelConfig, StoredTensor
from draftwood.targets.base import ForwardOutput
from draftwood.targets.cache import KVCache
from draftwood.targets.native.block_formats import choose_format, quantize_rows
from draftwood.targets.native.cpu.decoder import CpuDecoder
from draftwood.targets.native.decoder import PackedBatch
from draftwood.targets.native.quantize import Matrix, Stored
from draftwood.targets.native.weights import Weights

FORMAT = "q8_0"


class CpuFeatureDecoder(CpuDecoder):
    """The first layer reads normed tokens beside normed features; the feature is its residual."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        cache: KVCache,
        *,
        feature_norm: torch.Tensor,
        norm_before_residual: bool,
    ) -> None:
        """Quantises the matrices to 8 bits. ``weights.layers[0].qkv`` has 2H inputs, ``weights.embed`` any number of
        rows. ``norm_before_residual``: the residual is the normed feature."""
        for layer in weights.layers:
            layer.qkv, layer.o = quantized(layer.qkv), quantized(layer.o)
            layer.gate_up, layer.down = quantized(layer.gate_up), quantized(layer.down)
        weights.head = quantized(weights.head)
        super().__init__(config, weights, cache)
        self._model.feature_norm = self._pad_vector(feature_norm)
        self._model.norm_before_residual = int(norm_before_residual)

    def run(self, batch: PackedBatch, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits ``[R, V]`` of the requested rows, and the states ``[N, H]`` after the last layer; both are
        float32, and the next pass overwrites the logits. ``features [N, H]``."""
        output: ForwardOutput = self._run(batch, (self._config.num_layers,), features.float().contiguous())
        assert output.taps is not None
        return output.logits, output.taps


def quantized(weight: Matrix) -> Stored:
    """The rows as if a file had them; 8 bits where blocks fill the rows."""
    assert isinstance(weight, torch.Tensor)
    kind = choose_format(FORMAT, weight.shape[1], is_table=False)
    shape = (weight.shape[0], weight.shape[1])
    return Stored((StoredTensor(kind, shape, partial(_blocks, weight, kind), partial(_floats, weight)),))


def _blocks(weight: torch.Tensor, kind: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return quantize_rows(weight, kind).numpy()


def _floats(weight: torch.Tensor) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    return weight.float().numpy()
