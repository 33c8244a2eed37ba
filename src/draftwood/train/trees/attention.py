"""Attention of tree nodes at positions of texts: over the text up to their root, and over their ancestors.

Shapes: B texts, R roots per text, k query nodes per root, m key nodes per root.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from draftwood.targets.native.cuda import why_not_on

Rows = tuple[Tensor, Tensor]  # keys and values

FUSED_DTYPES = (torch.bfloat16, torch.float16)
MOST_FUSED_DIM = 256


def children_of(ancestors: Tensor, parents: Tensor) -> Tensor:
    """Return the ancestors of the next nodes, [B, R, k, m + k]: those of their parents, and themselves.

    ``parents [B, R, k]`` are rows of ``ancestors [B, R, nodes, m]``."""
    above = torch.take_along_dim(ancestors, parents[..., None], dim=2)
    own = torch.eye(parents.shape[2], dtype=torch.bool, device=parents.device)
    return torch.cat([above, own.expand(*above.shape[:2], -1, -1)], dim=-1)


def ancestors_of(parents: Tensor, height: int) -> Tensor:
    """Return the ancestors of all nodes, [..., N, N] bool, including the nodes themselves.

    ``parents [..., N]`` are trees of this height. Node 0 is the root and its own parent."""
    own = torch.eye(parents.shape[-1], dtype=torch.bool, device=parents.device)
    found = own.expand(*parents.shape, -1)
    for _ in range(height):
        found = own | torch.take_along_dim(found, parents[..., None], dim=-2)
    return found


def unseen_by(last: Tensor, num_text: int, ancestors: Tensor) -> Tensor:
    """Return the mask of keys that nodes do not see, [B, R, k, S + m].

    These are text positions after ``last [B, R]``, and nodes that are not ``ancestors [B, R, k, m]``."""
    behind = torch.arange(num_text, device=last.device) > last[..., None]  # [B, R, S]
    return torch.cat([behind[:, :, None].expand(-1, -1, ancestors.shape[2], -1), ~ancestors], dim=-1)


def joined(steps: Sequence[Rows], spare: int = 0) -> Rows:
    """Concatenate keys and values [B, R, k, kv_heads, D] of several steps and ``spare`` rows of zeros."""
    if len(steps) == 1 and not spare:
        return steps[0]
    key = steps[0][0]
    nothing = [key.new_zeros(*key.shape[:2], spare, *key.shape[3:])] if spare else []
    keys, values = (torch.cat([*rows, *nothing], dim=2) for rows in zip(*steps, strict=True))  # [B, R, m, ...]
    return keys, values


def is_fused(query: Tensor, *others: Tensor) -> bool:
    """Return whether one Triton kernel can run it without scores in memory: half precision, no gradients."""
    wants_gradients = torch.is_grad_enabled() and any(each.requires_grad for each in (query, *others))
    return not wants_gradients and has_kernel(query.dtype, query.shape[-1], query.device)


@cache
def has_kernel(dtype: torch.dtype, dim: int, device: torch.device) -> bool:
    """Return whether the kernel supports this head size, dtype and device."""
    return dtype in FUSED_DTYPES and dim <= MOST_FUSED_DIM and not why_not_on(device)


def tree_attention(query: Tensor, text: Rows, nodes: Rows, last: Tensor, ancestors: Tensor) -> Tensor:
    """Attend: ``query [B, R, k, heads, D]`` over the text and over ancestors.

    ``text [B, S, kv_heads, D]`` is shared by all roots and visible up to ``last [B, R]``. Of the ``nodes
    [B, R, m, kv_heads, D]`` the ``ancestors [B, R, k, m]`` are visible."""
    if is_fused(query, *text, *nodes):
        from draftwood.targets.native.cuda.attention import forest_attention

        return forest_attention(query, text, nodes, last, ancestors)
    return attention_in_steps(query, text, nodes, last, ancestors)


def attention_in_steps(query: Tensor, text: Rows, nodes: Rows, last: Tensor, ancestors: Tensor) -> Tensor:
    """Compute the same with all scores in memory, which gradients need."""
    unseen = unseen_by(last, text[0].shape[1], ancestors)
    num_texts, num_roots, width, heads, dim = query.shape
    num_text, kv_heads = text[0].shape[1:3]
    group = heads // kv_heads
    by_head = query.reshape(num_texts, num_roots, width, kv_heads, group, dim).permute(0, 3, 1, 2, 4, 5).contiguous()
    over_text = by_head.view(num_texts * kv_heads, -1, dim)  # [B*KV, R*k*G, D]
    over_nodes = over_text.view(-1, width * group, dim)  # [B*KV*R, k*G, D]
    text_key, text_value = (rows.transpose(1, 2).flatten(0, 1) for rows in text)  # [B*KV, S, D]
    key, value = (rows.permute(0, 3, 1, 2, 4).flatten(0, 2) for rows in nodes)  # [B*KV*R, m, D]
    scores = torch.cat(
        [_scores(over_text, text_key).view(*over_nodes.shape[:2], num_text), _scores(over_nodes, key)], dim=-1
    )  # [B*KV*R, k*G, S + m]
    in_parts = scores.view(num_texts, kv_heads, num_roots, width, group, -1)
    in_parts.masked_fill_(unseen[:, None, :, :, None], float("-inf"))
    weights = scores.softmax(dim=-1).to(value.dtype)
    of_text, of_nodes = weights.split_with_sizes([num_text, key.shape[1]], dim=-1)
    mixed = (of_text.reshape(*over_text.shape[:2], num_text) @ text_value).view_as(over_nodes) + of_nodes @ value
    return mixed.view(by_head.shape).permute(0, 2, 3, 1, 4, 5).reshape(query.shape)


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Return scores of ``query [n, q, D]`` and ``key [n, s, D]``, scaled before rounding."""
    scale = query.shape[-1] ** -0.5
    return torch.baddbmm(query.new_empty(1), query, key.transpose(1, 2), beta=0.0, alpha=scale)
