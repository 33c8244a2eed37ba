"""A head run over its own outputs along a text, for all positions at once.

At inference a head reads the text with the target's features, then its own guesses with its own. Training goes the same
way with the tokens of the text in place of guesses. Pair t is token t + 1 with the feature of position t. Row r of step
j is pair r + j, reached from pair r: steps 0 to j - 1 of the same row led to it, and the pairs up to r are text.

    step 0, row r    pair r, the target's feature
    step 1, row r    pair r + 1, the output of step 0 at row r
    step 2, row r    pair r + 2, the output of step 1 at row r

So row r of every step attends to the step-0 keys of pairs 0 to r and to its own keys of steps 1 to j: rows line up, and
one step has one row fewer than the one before. Texts are padded at the end, where nothing that counts ever looks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftwood.targets import Attend
from draftwood.train.attention.texts import causal_attention

# (embeds [B, n, Ht], features [B, n, H], positions [B, n], attend) -> [B, n, H]: the forward pass of EAGLE heads.
Forward = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]


class UnrolledAttention:
    """Keys and values of the steps so far, and who sees whom. Asking for a step again (as activation checkpointing
    does) gives the same answer again."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by step and layer, [..., N - step, kv_heads, D]

    def attend(self, step: int) -> Attend:
        """For a pass over rows 0 to N - 1 - ``step``."""
        return partial(self._attend, step)

    def _attend(self, step: int, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key = query.to(value.dtype), key.to(value.dtype)
        self._rows[step, layer] = key, value
        if step == 0:
            return causal_attention(query, key, value)
        size = query.shape[-3]
        steps = [self._rows[index, layer] for index in range(step + 1)]
        keys, values = ([rows[..., :size, :, :] for rows in kind] for kind in zip(*steps, strict=True))
        if not torch.is_grad_enabled():
            return _along(query, keys, values)
        # What takes memory that grows with the square of the length is not kept for the way back.
        mixed: Tensor = checkpoint(_along, query, keys, values, use_reentrant=False, preserve_rng_state=False)
        return mixed


def unroll(
    forward: Forward,
    embeds: Tensor,
    features: Tensor,
    positions: Tensor,
    num_steps: int,
    *,
    detach: bool = False,
    checkpoints: bool = False,
) -> list[Tensor]:
    """The outputs of every step, ``[B, N - j, H]`` of step j, from the pairs of a text: ``embeds [B, N, Ht]``,
    ``features [B, N, H]``. Fewer steps where the text is shorter.

    ``detach``: no gradient flows from a step back into the one whose output it reads.
    """
    attention = UnrolledAttention()
    outputs: list[Tensor] = []
    num_pairs = features.shape[1]
    for step in range(min(num_steps, num_pairs)):
        inputs = (embeds[:, step:], features[:, : num_pairs - step], positions[:, step:], attention.attend(step))
        output = (
            checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False)
            if checkpoints and torch.is_grad_enabled()
            else forward(*inputs)
        )
        outputs.append(output)
        features = output.detach() if detach else output
    return outputs


def _along(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Row r of ``query [..., n, heads, D]`` over rows 0 to r of the first step and row r of every other one."""
    query_shape = query.shape
    size, dim = query_shape[-3], query_shape[-1]
    text_keys, text_values = keys[0], values[0]  # [..., n, KV, D]
    own_keys, own_values = torch.stack(keys[1:], dim=-2), torch.stack(values[1:], dim=-2)  # [..., n, KV, j, D]
    query = query.reshape(*query_shape[:-2], text_keys.shape[-2], -1, dim) * dim**-0.5  # [..., n, KV, G, D]
    by_head = query.movedim(-4, -2)  # [..., KV, G, n, D]
    text_keys, text_values = (x.transpose(-2, -3).unsqueeze(-3) for x in (text_keys, text_values))  # [..., KV, 1, n, D]
    text_scores = (by_head @ text_keys.transpose(-1, -2)).to(_wide(query))  # [..., KV, G, n, n]
    later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    text_scores = text_scores.masked_fill_(later, float("-inf"))
    own_scores = (query @ own_keys.transpose(-1, -2)).to(_wide(query)).movedim(-4, -2)  # [..., KV, G, n, j]
    weights = torch.cat([text_scores, own_scores], dim=-1).softmax(dim=-1).to(query.dtype)
    mixed: Tensor = (weights[..., :size] @ text_values).movedim(-2, -4)  # [..., n, KV, G, D]
    mixed = mixed + weights[..., size:].movedim(-2, -4) @ own_values
    return mixed.reshape(query_shape)


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
