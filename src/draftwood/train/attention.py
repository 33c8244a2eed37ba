"""Attention along texts that are padded at the end: plain causal order, in which nothing that counts sees padding."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Every position sees itself and those before it: ``query [..., N, heads, D]``, keys and values for as many heads
    or for groups of them."""
    query, key, value = (each.transpose(-2, -3) for each in (query, key, value))  # [..., heads, N, D]
    grouped = query.shape[-3] != key.shape[-3]
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped).transpose(-2, -3)
