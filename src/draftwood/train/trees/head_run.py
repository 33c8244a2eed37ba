"""Run a head along texts and down trees at root positions, all nodes of a depth of all trees at once.

    run = HeadRun(head, batch, signals, roots)
    hidden = run.along_text()                                # [B, L-1, H] after every pair of the texts
    hidden = run.at_roots()                                  # [B, R, 1, H] after the roots
    hidden = run.step(tokens, parents)                       # [B, R, k, H] after their children, and so on

Shapes: B texts, R roots per text, k nodes per depth and root. Root s is the pair (token s, feature of s - 1), the last
one that a head reads before it drafts. A node reads the head's output for its parent, and attends to the pairs up to
its root (with the target's features), its ancestors and itself.
"""

from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftwood.heads import Eagle3Head, EagleHead
from draftwood.targets import Attend
from draftwood.train.attention import causal_attention
from draftwood.train.base import Batch, Signals
from draftwood.train.trees.attention import Rows, attention_in_steps, children_of, is_fused, joined, tree_attention

MAX_SCORES = 1 << 26  # attention scores in memory at once

DraftHead = EagleHead | Eagle3Head


class HeadRun:
    """``roots [B, R]`` are positions >= 1. Gradients flow if they are enabled.

    ``detach``: no gradient from a node into its parent's output. ``checkpoints``: activation checkpointing. ``fused``:
    use one kernel if no gradients are needed, which rounds less than the path with gradients. ``noise [B, L, H]`` is
    added to the target's features.
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
        fused: bool = True,
        noise: Tensor | None = None,
    ) -> None:
        self._head = head
        self._fused = fused
        self._detach = detach
        self._checkpoints = checkpoints
        self._pairs = roots - 1  # [B, R] index of the pair
        self._reach: list[int] = roots.amax(dim=0).tolist()  # [R] maximum number of visible pairs
        self._text: dict[int, Rows] = {}  # by layer [B, L-1, kv_heads, D]
        self._nodes: dict[tuple[int, int], Rows] = {}  # by depth and layer [B, R, k, kv_heads, D]
        self._ancestors = [torch.zeros(*roots.shape, 1, 0, dtype=torch.bool, device=roots.device)]  # [B, R, k, m] each
        self._along = self._read_text(batch, signals, noise)
        self._hidden = torch.take_along_dim(self._along, self._pairs[..., None], dim=1)[:, :, None]

    def along_text(self) -> Tensor:
        """Return the head's output after every pair, [B, L-1, H]."""
        return self._along

    def at_roots(self) -> Tensor:
        """Return the head's output after the roots, [B, R, 1, H]."""
        assert len(self._ancestors) == 1, "the run has already left its roots"
        return self._hidden

    def step(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """Return the head's output after the nodes of the next depth, [B, R, k, H].

        ``tokens [B, R, k]`` are their tokens, ``parents [B, R, k]`` indices of the nodes of the previous step."""
        depth = len(self._ancestors)
        self._ancestors.append(children_of(self._ancestors[-1], parents))
        positions = (self._pairs[..., None] + depth).expand(tokens.shape)
        given = self._hidden.detach() if self._detach else self._hidden
        features = torch.take_along_dim(given, parents[..., None], dim=2)
        embeds = self._head.embed(tokens).to(features.dtype)
        self._hidden = self._run(embeds, features, positions, partial(self._attend_nodes, depth))
        return self._hidden

    def _read_text(self, batch: Batch, signals: Signals, noise: Tensor | None) -> Tensor:
        features = self._head.fuse(signals.taps[:, :-1].to(self._head.fc.weight.dtype))
        if noise is not None:
            features = features + noise[:, :-1].to(features.dtype)
        embeds = self._head.embed(batch.token_ids[:, 1:]).to(features.dtype)
        return self._run(embeds, features, batch.positions()[:, :-1], self._attend_text)

    def _run(self, embeds: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        given = embeds, features, positions, attend
        if self._checkpoints and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(self._head, *given, use_reentrant=False, preserve_rng_state=False))
        return cast(Tensor, self._head(*given))

    def _attend_text(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend causally. Padding is at the end, so no token sees it."""
        query, key = query.to(value.dtype), key.to(value.dtype)
        self._text[layer] = key, value
        return causal_attention(query, key, value)

    def _attend_nodes(self, depth: int, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = query.to(value.dtype), key.to(value.dtype)
        self._nodes[depth, layer] = key, value
        nodes = joined([self._nodes[above, layer] for above in range(1, depth + 1)])  # [B, R, m, kv_heads, D]
        text, ancestors = self._text[layer], self._ancestors[depth]
        if self._fused and is_fused(query, *text, *nodes):
            return tree_attention(query, text, nodes, self._pairs, ancestors)
        return self._attend_in_blocks(query, text, nodes, ancestors)

    def _attend_in_blocks(self, query: Tensor, text: Rows, nodes: Rows, ancestors: Tensor) -> Tensor:
        """Attend in blocks of roots. With gradients the scores are recomputed in the backward pass."""
        num_texts, num_roots, width, heads, _ = query.shape
        num_seen = text[0].shape[1] + ancestors.shape[-1]
        size = max(1, MAX_SCORES // (num_texts * width * heads * num_seen))
        mixed = []
        for first in range(0, num_roots, size):
            rows = slice(first, first + size)
            seen = max(self._reach[rows])
            given = (
                query[:, rows], (text[0][:, :seen], text[1][:, :seen]), (nodes[0][:, rows], nodes[1][:, rows]),
                self._pairs[:, rows], ancestors[:, rows],
            )  # fmt: skip
            if torch.is_grad_enabled() and num_roots > size:
                again = checkpoint(attention_in_steps, *given, use_reentrant=False, preserve_rng_state=False)
                mixed.append(cast(Tensor, again))
            else:
                mixed.append(attention_in_steps(*given))
        return torch.cat(mixed, dim=1)
