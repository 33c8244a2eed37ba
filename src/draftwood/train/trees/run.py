"""A head along texts, and from some of their positions down trees, all nodes of a depth of all trees at once.

    run = HeadRun(head, batch, signals, roots)
    hidden = run.at_roots()                                  # [B, R, 1, H] behind the roots
    hidden = run.step(tokens, parents)                       # [B, R, k, H] behind their children, and so on

Shapes: B texts, R roots in each, k nodes of a depth below a root. A root s stands for the pair (token s, feature of
s - 1), the last that a head reads before it drafts. A node below it reads the head's own output for its parent, and
sees the pairs up to its root, as the target's features made them, then its ancestors and itself.
"""

from __future__ import annotations

from functools import partial
from typing import cast

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftwood.heads import Attend, Eagle3Head, EagleHead
from draftwood.train.base import Batch, Signals

MOST_SCORES = 1 << 26  # attention weights that are held at once

DraftHead = EagleHead | Eagle3Head
Rows = tuple[Tensor, Tensor]  # keys and values


class HeadRun:
    """``roots [B, R]`` are positions from 1 on; gradients flow where they are enabled.

    ``detach``: none from a node back into the output that it reads. ``checkpoints``: what lies between is computed
    again on the way back.
    """

    def __init__(
        self,
        head: DraftHead,
        batch: Batch,
        signals: Signals,
        roots: Tensor,
        *,
        detach: bool = False,
        checkpoints: bool = False,
    ) -> None:
        self._head = head
        self._detach = detach
        self._checkpoints = checkpoints
        self._pairs = roots - 1  # [B, R] by number of the pair
        self._reach: list[int] = roots.amax(dim=0).tolist()  # [R] pairs that the trees of this number see at most
        self._text: dict[int, Rows] = {}  # by layer [B, L-1, kv_heads, D]
        self._nodes: dict[tuple[int, int], Rows] = {}  # by depth and layer [B, R, k, kv_heads, D]
        self._ancestors = [torch.zeros(*roots.shape, 1, 0, dtype=torch.bool, device=roots.device)]  # [B, R, k, m] each
        self._hidden = self._read_text(batch, signals)

    def at_roots(self) -> Tensor:
        """The head's output behind the roots, [B, R, 1, H]."""
        assert len(self._ancestors) == 1, "the run is further down by now"
        return self._hidden

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """The head's output behind the nodes one deeper, [B, R, k, H]: their ``tokens [B, R, k]``, and which of the
        nodes of the last step are their ``parents [B, R, k]``."""
        depth = len(self._ancestors)
        above = torch.take_along_dim(self._ancestors[-1], parents[..., None], dim=2)
        self._ancestors.append(_with_themselves(above))
        positions = (self._pairs[..., None] + depth).expand(tokens.shape)
        given = self._hidden.detach() if self._detach else self._hidden
        features = torch.take_along_dim(given, parents[..., None], dim=2)
        embeds = self._head.embed(tokens).to(features.dtype)
        self._hidden = self._run(embeds, features, positions, partial(self._attend_nodes, depth))
        return self._hidden

    def _read_text(self, batch: Batch, signals: Signals) -> Tensor:
        features = self._head.fuse(signals.taps[:, :-1].to(self._head.fc.weight.dtype))
        embeds = self._head.embed(batch.token_ids[:, 1:]).to(features.dtype)
        hidden = self._run(embeds, features, batch.positions()[:, :-1], self._attend_text)  # [B, L-1, H]
        return torch.take_along_dim(hidden, self._pairs[..., None], dim=1)[:, :, None]

    def _run(self, embeds: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        given = embeds, features, positions, attend
        if self._checkpoints and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(self._head, *given, use_reentrant=False, preserve_rng_state=False))
        return cast(Tensor, self._head(*given))

    def _attend_text(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Plain causal order; padding comes last and is seen by nobody."""
        query, key = query.to(value.dtype), key.to(value.dtype)
        self._text[layer] = key, value
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped).transpose(1, 2)

    def _attend_nodes(self, depth: int, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Blocks of roots; where gradients are wanted the weights are computed again for them."""
        query, key = query.to(value.dtype), key.to(value.dtype)
        self._nodes[depth, layer] = key, value
        rows_of_depths = [self._nodes[above, layer] for above in range(1, depth + 1)]
        key, value = (torch.cat(rows, dim=2) for rows in zip(*rows_of_depths, strict=True))  # [B, R, m, kv_heads, D]
        text_key, text_value = self._text[layer]
        num_texts, num_roots, width, heads, _ = query.shape
        size = max(1, MOST_SCORES // (num_texts * width * heads * (text_key.shape[1] + key.shape[2])))
        mixed = []
        for first in range(0, num_roots, size):
            rows = slice(first, first + size)
            seen = max(self._reach[rows])
            given = (
                query[:, rows], text_key[:, :seen], text_value[:, :seen], self._pairs[:, rows],
                key[:, rows], value[:, rows], self._ancestors[depth][:, rows],
            )  # fmt: skip
            if torch.is_grad_enabled() and num_roots > size:
                again = checkpoint(_tree_attention, *given, use_reentrant=False, preserve_rng_state=False)
                mixed.append(cast(Tensor, again))
            else:
                mixed.append(_tree_attention(*given))
        return torch.cat(mixed, dim=1)


def _with_themselves(ancestors: Tensor) -> Tensor:
    """Nodes that see ``ancestors [B, R, k, m]``, and themselves: [B, R, k, m + k]."""
    own = torch.eye(ancestors.shape[2], dtype=torch.bool, device=ancestors.device)
    return torch.cat([ancestors, own.expand(*ancestors.shape[:2], -1, -1)], dim=-1)


def _tree_attention(
    query: Tensor, text_key: Tensor, text_value: Tensor, pairs: Tensor, key: Tensor, value: Tensor, ancestors: Tensor
) -> Tensor:
    """``query [B, R, k, heads, D]`` over the text's pairs up to ``pairs [B, R]`` and over those of ``key, value
    [B, R, m, kv_heads, D]`` that are ``ancestors [B, R, k, m]``."""
    num_texts, num_roots, width, heads, dim = query.shape
    num_pairs, kv_heads = text_key.shape[1:3]
    group = heads // kv_heads
    query = query.view(num_texts, num_roots, width, kv_heads, group, dim).permute(0, 3, 1, 2, 4, 5)
    query = query.reshape(num_texts, kv_heads, num_roots, width * group, dim)
    on_text = query.flatten(2, 3) @ text_key.permute(0, 2, 3, 1)  # [B, KV, R*k*G, S]
    unseen = torch.arange(num_pairs, device=pairs.device) > pairs[..., None]  # [B, R, S]
    on_text = _wide(on_text.view(*query.shape[:-1], num_pairs)).masked_fill(unseen[:, None, :, None], float("-inf"))
    hidden = ~ancestors.repeat_interleave(group, dim=2)  # [B, R, k*G, m]
    on_nodes = _wide(query @ key.permute(0, 3, 1, 4, 2)).masked_fill(hidden[:, None], float("-inf"))
    weights = (torch.cat([on_text, on_nodes], dim=-1) * dim**-0.5).softmax(dim=-1).to(value.dtype)
    of_text, of_nodes = weights.split_with_sizes([num_pairs, key.shape[2]], dim=-1)  # [B, KV, R, k*G, S or m]
    mixed: Tensor = (of_text.flatten(2, 3) @ text_value.transpose(1, 2)).view_as(query)
    mixed = mixed + of_nodes @ value.permute(0, 3, 1, 2, 4)
    by_node = mixed.view(num_texts, kv_heads, num_roots, width, group, dim).permute(0, 2, 3, 1, 4, 5)
    return by_node.reshape(num_texts, num_roots, width, heads, dim)


def _wide(scores: Tensor) -> Tensor:
    return scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
