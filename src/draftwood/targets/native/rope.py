"""Rotary frequencies of the variants that the native decoders implement."""

import math

import torch

from draftwood.models import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Returns the angle per position of each pair of dimensions, ``[head_dim / 2]`` float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)  # [D/2]
    if rope.kind == "none":
        return torch.zeros_like(frequencies)  # a rotation by 0 changes no bit
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    return frequencies


def _llama3(rope: Rope, frequencies: torch.Tensor) -> torch.Tensor:
    """Stretches slow rotations by the factor, keeps fast ones and blends those between."""
    turns = rope.original_context * frequencies / (2 * math.pi)  # turns within the original context
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1.0 - blend) * frequencies / rope.factor + blend * frequencies
