"""Attention along texts that are padded at the end: plain causal order, in which nothing that counts sees padding."""

from __future__ import annotations

from contextlib import nullcontext

import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

# All but cuDNN, which makes a new plan for every shape; texts have hundreds, and a plan takes longer than a step.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every position sees itself and those before it: ``query [..., N, heads, D]``, keys and values for as many heads
    or for groups of them."""
    query, key, value = (each.transpose(-2, -3) for each in (query, key, value))  # [..., heads, N, D]
    group = query.shape[-3] // key.shape[-3]
    if group > 1 and not _takes_groups(query, key, value):
        key, value = (each.repeat_interleave(group, dim=-3) for each in (key, value))
        group = 1
    with sdpa_kernel(BACKENDS) if query.is_cuda else nullcontext():
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=group > 1)
    return mixed.transpose(-2, -3)


def _takes_groups(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether heads may share keys and values without all scores in memory: of a GPU's kernels one alone can do that,
    and it knows no float32."""
    return not query.is_cuda or can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, True))
