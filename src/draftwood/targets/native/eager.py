"""The decoder in plain torch, for any device and floating-point type: the reference for the fused decoders.

Attention is two batched products with an additive bias over the used slots of the sequence. Unlike the fused attention
functions of torch it has no slow path for grouped heads under an arbitrary mask.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name

from draftwood.models import ModelConfig
from draftwood.targets.base import Attend, ForwardOutput, depths_of
from draftwood.targets.cache import KVCache
from draftwood.targets.native.decoder import Decoder, PackedBatch, PackedSegment
from draftwood.targets.native.quantize import to_dense
from draftwood.targets.native.rope import inverse_frequencies
from draftwood.targets.native.weights import LayerWeights, Weights
from draftwood.tree import ancestor_mask

HEAD_ROWS = 16_384  # rows of a half-precision head expanded to float32 at a time

Turns = tuple[torch.Tensor, torch.Tensor]  # cosines and sines [..., N, 1, D]; both halves of D are the same


class EagerLayers:
    """``Layers`` in plain torch."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.dtype, self.device = weights.embed.dtype, weights.embed.device
        self._weights = weights
        self._ropes = [config.layer_kind(index).rope for index in range(config.num_layers)]
        self._inverse_frequencies = {
            rope: inverse_frequencies(rope, config.head_dim).to(self.device) for rope in set(self._ropes)
        }

    def states(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> Iterator[torch.Tensor]:
        """Yields the hidden states ``[..., N, H]`` of tokens ``[..., N]`` at ``positions [..., N]``: before every
        layer, and after the last."""
        weights, scale = self._weights, self.config.residual_scale
        norms = [*(layer.input_norm for layer in weights.layers), weights.norm]
        rotations = {rope: self._rotation(positions, angles) for rope, angles in self._inverse_frequencies.items()}
        hidden = _scale(F.embedding(token_ids, weights.embed), self.config.embedding_scale)
        normed = self._norm(hidden, norms[0])
        for index, layer in enumerate(weights.layers):
            yield hidden
            mixed = self._attention(index, layer, normed, rotations[self._ropes[index]], attend)
            hidden, normed = self._add(hidden, _scale(mixed, scale), layer.post_norm)
            hidden, normed = self._add(hidden, _scale(self._feed_forward(layer, normed), scale), norms[index + 1])
        yield hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the logits of last states ``[R, H]``, in float32 whatever the weights are: half-precision logits tie
        where those of the model do not."""
        normed = self._norm(hidden, self._weights.norm)  # [R, H]
        head = to_dense(self._weights.head, normed.dtype)
        if head.dtype == torch.float32:
            logits = F.linear(normed, head)
        elif head.is_cuda:
            logits = torch.mm(normed, head.t(), out_dtype=torch.float32)
        else:
            parts = [F.linear(normed.float(), rows.float()) for rows in torch.split(head, HEAD_ROWS)]
            logits = torch.cat(parts, dim=-1)
        return _scale(logits, self.config.logit_scale)

    def _attention(
        self, index: int, layer: LayerWeights, normed: torch.Tensor, rotation: Turns, attend: Attend
    ) -> torch.Tensor:
        qkv = F.linear(normed, to_dense(layer.qkv, normed.dtype), layer.qkv_bias)
        query, key, value = self._turn(layer, qkv, rotation)
        if self.config.attention_scale is not None:  # attend() itself scales by D ** -0.5
            query = query * (self.config.attention_scale * self.config.head_dim**0.5)
        mixed = attend(index, query, key, value)
        return F.linear(mixed.flatten(-2), to_dense(layer.o, mixed.dtype), layer.o_bias)

    def _feed_forward(self, layer: LayerWeights, normed: torch.Tensor) -> torch.Tensor:
        gate_up = F.linear(normed, to_dense(layer.gate_up, normed.dtype))
        return F.linear(self._gate(gate_up), to_dense(layer.down, normed.dtype))

    def _rotation(self, positions: torch.Tensor, frequencies: torch.Tensor) -> Turns:
        angles = positions.float()[..., None] * frequencies  # [..., N, D/2]
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]  # [..., N, 1, D]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    def _split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns views: queries ``[..., N, heads, D]``, keys and values ``[..., N, kv_heads, D]``."""
        config = self.config
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        query, key, value = torch.split(qkv.view(*qkv.shape[:-1], sum(sizes), config.head_dim), sizes, dim=-2)
        return query, key, value

    # Small steps between the products. Subclasses override them with fused kernels.

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, weight, self.config.norm_eps)

    def _add(
        self, hidden: torch.Tensor, change: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the new hidden states, and their norm."""
        hidden = hidden + change
        return hidden, self._norm(hidden, weight)

    def _turn(
        self, layer: LayerWeights, qkv: torch.Tensor, rotation: Turns
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries and keys, normalised if the model does that, and rotated; and values."""
        query, key, value = self._split(qkv)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = self._norm(query, layer.q_norm), self._norm(key, layer.k_norm)
        return rotate(query, *rotation), rotate(key, *rotation), value

    def _gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class EagerDecoder(Decoder):
    name = "eager"

    def __init__(self, config: ModelConfig, weights: Weights, cache: KVCache, device: torch.device) -> None:
        self._layers = EagerLayers(config, weights)
        self._windows = [config.layer_kind(index).sliding_window for index in range(config.num_layers)]
        self._cache = cache
        self._device = device

    @staticmethod
    def why_declined(config: ModelConfig) -> str:
        """Returns why this decoder cannot run a model; empty if it can."""
        return config.why_not_native()

    @torch.inference_mode()
    def forward(self, batch: PackedBatch, tap_layers: tuple[int, ...]) -> ForwardOutput:
        ids, positions = (torch.tensor(each, device=self._device) for each in (batch.token_ids, batch.positions()))
        attend = CacheAttention(self._cache, batch.segments, self._windows)
        taps: dict[int, torch.Tensor] = {}
        for index, hidden in enumerate(self._layers.states(ids, positions, attend)):  # [N, H]
            if index in tap_layers:
                taps[index] = hidden
        rows = torch.tensor(batch.logit_rows(), device=self._device, dtype=torch.int64)  # [R]
        logits = self._layers.logits(hidden[rows])  # [R, V]
        tapped = torch.cat([taps[index] for index in tap_layers], dim=-1) if tap_layers else None  # [N, T*H]
        return ForwardOutput(logits, logits.argmax(dim=-1), tapped)

    def move_rows(self, sources: list[int], first: int) -> None:
        self._cache.move_rows(sources, first)


class CacheAttention:
    """Tree attention of a packed batch over a cache. Each call also writes the keys and values of its layer."""

    def __init__(self, cache: KVCache, segments: Sequence[PackedSegment], windows: Sequence[int | None] = ()) -> None:
        """``windows``: the sliding window of each layer; empty: no layer has one."""
        self._cache = cache
        self._segments = segments
        self._windows = windows
        self._biases = {
            window: [_bias(segment, window).to(cache.keys.device) for segment in segments]
            for window in set(windows) or {None}
        }

    def __call__(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """``query [N, heads, D]`` and ``key, value [N, kv_heads, D]`` of the packed rows -> ``[N, heads, D]``."""
        mixed = torch.empty_like(query)
        biases = self._biases[self._windows[layer] if self._windows else None]
        for segment, bias in zip(self._segments, biases, strict=True):
            rows = segment.rows
            keys, values = self._write(layer, segment, key[rows], value[rows])
            mixed[rows] = grouped_attention(query[rows], keys, values, bias)
        return mixed

    def _write(
        self, layer: int, segment: PackedSegment, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the segment's own nodes; returns all keys and values of its sequence, ``[kv_heads, S, D]``."""
        first = segment.first_slot
        end = first + segment.size
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys[:, first:end] = key.transpose(0, 1)
        values[:, first:end] = value.transpose(0, 1)
        return keys[:, segment.base : end], values[:, segment.base : end]


def _scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1.0 else x * factor


def _bias(segment: PackedSegment, window: int | None) -> torch.Tensor:
    """Returns 0 where a node of the segment may attend, -inf elsewhere, ``[n, prefix + after + n]``."""
    visible = torch.ones(segment.size, segment.prefix_len + len(segment.parents), dtype=torch.bool)
    visible[:, segment.prefix_len :] = torch.from_numpy(ancestor_mask(segment.parents))[segment.after :]
    if window is not None:
        nodes = segment.prefix_len + torch.tensor(depths_of(segment.parents))  # [after + n]
        there = torch.cat([torch.arange(segment.prefix_len), nodes])  # [prefix + after + n]
        visible &= nodes[segment.after :, None] - there[None, :] < window
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates each pair of dimensions (i, i + D/2) by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def grouped_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """``query [n, heads, D]`` over ``keys, values [kv_heads, S, D]`` with ``bias [n, S]`` -> ``[n, heads, D]``."""
    size, heads, dim = query.shape
    kv_heads = keys.shape[0]
    stacked = query.view(size, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)  # [KV, G*n, D]
    scores = torch.bmm(stacked, keys.transpose(1, 2)).float() * dim**-0.5  # [KV, G*n, S]
    scores = scores.view(kv_heads, -1, size, keys.shape[1]) + bias
    weights = scores.softmax(dim=-1).to(values.dtype).view(kv_heads, -1, keys.shape[1])
    mixed = torch.bmm(weights, values)  # [KV, G*n, D]
    return mixed.view(kv_heads, -1, size, dim).permute(2, 0, 1, 3).reshape(size, heads, dim)
