"""Attention along texts that are padded at the end: plain causal order, in which nothing that counts sees padding."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every position sees itself and those before it: ``query [..., N, heads, D]``, keys and values for as many heads
    or for groups of them."""
    query, key, value = (each.transpose(-2, -3) for each in (query, key, value))  # [..., heads, N, D]
    group = query.shape[-3] // key.shape[-3]
    if group > 1 and not _takes_groups(query, key, value):
        key, value = (each.repeat_interleave(group, dim=-3) for each in (key, value))
        group = 1
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=group > 1).transpose(-2, -3)


def _takes_groups(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether heads may share keys and values without all scores in memory: of a GPU's kernels one alone can do that,
    and it knows no float32."""
    return not query.is_cuda or can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, True, True))
