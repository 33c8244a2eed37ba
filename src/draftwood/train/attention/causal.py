"""Causal attention along texts. Padding is at the end, so no token of a text sees it."""

from contextlib import nullcontext

import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

# Without cuDNN, which builds a plan per shape: texts have hundreds of lengths, and a plan takes longer than a step.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend causally: ``query [..., N, heads, D]`` over ``key`` and ``value [..., N, kv_heads, D]``."""
    query, key, value = (each.transpose(-2, -3) for each in (query, key, value))  # [..., heads, N, D]
    group = query.shape[-3] // key.shape[-3]
    if group > 1 and not _supports_groups(query, key, value):
        key, value = (each.repeat_interleave(group, dim=-3) for each in (key, value))
        group = 1
    with sdpa_kernel(BACKENDS) if query.is_cuda else nullcontext():
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=group > 1)
    return mixed.transpose(-2, -3)


def _supports_groups(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether grouped-query attention runs without materialising scores.

    On GPUs only flash attention does, and it does not support float32."""
    return not query.is_cuda or can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, True))
