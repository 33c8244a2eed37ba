"""Unrolling: run a head on its own outputs along a text, for all positions at once.

At inference a head reads the text with the target's features, then its own tokens with its own features. Training does
the same with the tokens of the text. Pair t is token t + 1 with the feature of position t. Row r of step j is pair
r + j, reached from pair r: steps 0 to j - 1 of the same row precede it, and the pairs up to r are text.

    step 0, row r    pair r, the target's feature
    step 1, row r    pair r + 1, the output of step 0 at row r
    step 2, row r    pair r + 2, the output of step 1 at row r

Row r of every step therefore attends to the step-0 keys of pairs 0 to r and to its own keys of steps 1 to j. Rows are
aligned, and each step has one row fewer than the previous one. Padding is at the end, so no token of a text sees it.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftwood.targets import Attend
from draftwood.train.attention.causal import causal_attention

# (embeds [B, n, Ht], features [B, n, H], positions [B, n], attend) -> [B, n, H]: the forward pass of EAGLE heads.
Forward = Callable[[Tensor, Tensor, Tensor, Attend], Tensor]


class UnrolledAttention:
    """Keys and values of the steps so far. Running a step again (activation checkpointing) gives the same result."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by step and layer, [..., N - step, kv_heads, D]

    def attend(self, step: int) -> Attend:
        """Return the attention of a pass over rows 0 to N - 1 - ``step``."""
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
            return _attend_rows(query, keys, values)
        # Scores grow with the square of the length, so they are recomputed in the backward pass.
        mixed: Tensor = checkpoint(_attend_rows, query, keys, values, use_reentrant=False, preserve_rng_state=False)
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
    """Return the outputs of every step, ``[B, N - j, H]`` for step j; fewer steps if the text is shorter.

    The pairs of a text are ``embeds [B, N, Ht]`` and ``features [B, N, H]``. With ``detach`` no gradient flows from a
    step into the previous one.
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


def _attend_rows(query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attend: row r of ``query [..., n, heads, D]`` over rows 0 to r of step 0 and row r of every other step."""
    query_shape = query.shape
    size, dim = query_shape[-3], query_shape[-1]
    text_keys, text_values = keys[0], values[0]  # [..., n, KV, D]
    own_keys, own_values = torch.stack(keys[1:], dim=-2), torch.stack(values[1:], dim=-2)  # [..., n, KV, j, D]
    query = query.reshape(*query_shape[:-2], text_keys.shape[-2], -1, dim) * dim**-0.5  # [..., n, KV, G, D]
    by_head = query.movedim(-4, -2)  # [..., KV, G, n, D]
    text_keys, text_values = (x.transpose(-2, -3).unsqueeze(-3) for x in (text_keys, text_values))  # [..., KV, 1, n, D]
    text_scores = (by_head @ text_keys.transpose(-1, -2)).to(_score_dtype(query))  # [..., KV, G, n, n]
    later = torch.ones(size, size, dtype=torch.bool, device=query.device).triu(1)
    text_scores = text_scores.masked_fill_(later, float("-inf"))
    own_scores = (query @ own_keys.transpose(-1, -2)).to(_score_dtype(query)).movedim(-4, -2)  # [..., KV, G, n, j]
    weights = torch.cat([text_scores, own_scores], dim=-1).softmax(dim=-1).to(query.dtype)
    mixed: Tensor = (weights[..., :size] @ text_values).movedim(-2, -4)  # [..., n, KV, G, D]
    mixed = mixed + weights[..., size:].movedim(-2, -4) @ own_values
    return mixed.reshape(query_shape)


def _score_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
