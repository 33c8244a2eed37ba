"""The weights of a feature decoder: a small decoder whose rows are a token and a *feature*.

A feature is a vector that stands for the text before the token. EAGLE draft heads are such decoders. A row's feature is
computed from hidden states of the target where the target has read the text, and otherwise is what this decoder stored
at the row's parent. This module does not import Triton.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from draftwood.models import ModelConfig
from draftwood.targets.native.cuda.inputs import MAX_MOVES
from draftwood.targets.native.quantize import Matrix, quantize_matrix
from draftwood.targets.native.weights import Weights

MAX_FEATURES = MAX_MOVES  # rows of a pass: the slots of their features are passed in the buffer for moves
FORMAT = "fp8"
MIN_BYTES = 8 << 20  # of a matrix that takes so long to load that widening half the bytes is quicker


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureWeights:
    """Weights, and how token and feature are joined.

    With ``fc``, one matrix maps both to a hidden state. Without it both are normed, the first layer attends over their
    concatenation, and the feature is its residual.
    """

    config: ModelConfig  # of the layers; `vocab_size` is the head's
    weights: Weights  # `layers[0].qkv` reads the output of `fc`, or token and feature [..., 2H]
    fc: torch.Tensor | None  # [H, 2H]
    fc_bias: torch.Tensor | None  # [H]
    feature_norm: torch.Tensor | None  # [H] without `fc`; tokens are normed by `layers[0].input_norm`
    norm_before_residual: bool  # whether the residual of the first layer is the normed feature
    has_norm: bool  # whether the lm_head reads states normed by `weights.norm`
    norm_eps: float  # of that norm
    norm_output: bool  # whether the stored feature is normed by it too
    fuse: Callable[[torch.Tensor], torch.Tensor]  # taps [N, T] of the target to features [N, H]
    tap_size: int  # T

    @property
    def joined_size(self) -> int:
        """Columns of token and feature side by side."""
        return 2 * self.config.hidden_size


def in_8_bits(weights: Weights) -> Weights:
    """The same weights with 8-bit copies of large matrices."""
    layers = [
        replace(
            layer,
            qkv=_narrowed(layer.qkv),
            o=_narrowed(layer.o),
            gate_up=_narrowed(layer.gate_up),
            down=_narrowed(layer.down),
        )
        for layer in weights.layers
    ]
    return replace(weights, layers=layers, head=_narrowed(weights.head))


def _narrowed(matrix: Matrix) -> Matrix:
    if isinstance(matrix, torch.Tensor) and matrix.nbytes >= MIN_BYTES:
        return quantize_matrix(matrix, FORMAT)
    return matrix
