"""A small decoder whose rows are a token and a *feature*: what stands before the token, as hidden states tell it.

Draft heads of the EAGLE family are such decoders. A row's feature is made of hidden states of a larger model, where
that has read the text so far, or is what this decoder itself left at the row's parent. Here is what one is made of, for
the passes of feature_passes.py. No Triton is needed to read this file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from draftwood.models import ModelConfig
from draftwood.targets.native.cuda.inputs import MOST_MOVES
from draftwood.targets.native.weights import Weights

MOST_FEATURES = MOST_MOVES  # rows of a pass: the slots of their features travel where other passes have moves


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureWeights:
    """How token and feature come together: one matrix makes a hidden state of them (``fc``), or both are normed and the
    first layer attends over them side by side, with the feature as what goes around it."""

    config: ModelConfig  # of the layers; `vocab_size` is that of the head
    weights: Weights  # `layers[0].qkv` reads a hidden state behind `fc`, else token and feature [..., 2H]
    fc: torch.Tensor | None  # [H, 2H]
    fc_bias: torch.Tensor | None  # [H]
    feature_norm: torch.Tensor | None  # [H] without `fc`; tokens are normed by `layers[0].input_norm`
    keeps_normed: bool  # whether the normed feature goes around the first layer
    has_norm: bool  # whether the head reads normed states: `weights.norm`
    norm_eps: float  # of that norm
    leaves_normed: bool  # whether what a row leaves as a feature is normed so too
    fuse: Callable[[torch.Tensor], torch.Tensor]  # taps [N, T] of the larger model to features [N, H]
    tap_size: int  # T

    @property
    def joined_size(self) -> int:
        """Columns of token and feature side by side."""
        return 2 * self.config.hidden_size
