"""The frozen target during training: hidden states and logits along texts, without gradients."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from draftwood.heads import Head, float_logits
from draftwood.targets import Layers, Segment, Target, TargetParts, chain_parents
from draftwood.targets.native import rms_norm
from draftwood.train.attention import causal_attention
from draftwood.train.base import Batch, Signals
from draftwood.train.frozen.memory import bytes_per_row, working_memory

PASS_TOKENS = 4096  # tokens per pass of the target
LAYER_TOKENS = 65536  # tokens that run through the layers at once, including padding; fewer on a small GPU


class FrozenTarget:
    """Computes hidden states. ``taps``: those that the head reads, see ``Target.set_taps``."""

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        self.target = target
        self.parts: TargetParts = target.parts()
        self._taps = tuple(taps)
        self._last = target.info.num_layers

    @classmethod
    def of(cls, target: Target, head: Head) -> Self:
        """Build for a head, and bind it to the target's embeddings and lm_head."""
        frozen = cls(target, head.config.taps_for(target.info.num_layers))
        head.bind(frozen.parts)
        return frozen

    @torch.no_grad()
    def signals(self, batch: Batch) -> Signals:
        """Run all texts through the target."""
        layers = self.target.layers()
        states = self._run_passes(batch) if layers is None else self._run_layers(layers, batch)
        width = self.target.info.hidden_size
        return Signals(states[..., : -width or None], states[..., -width:])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the target's logits after ``hidden [..., H]``, float32 ``[..., V]``, without gradients."""
        with torch.no_grad():
            return float_logits(rms_norm(hidden, self.parts.norm, self.parts.norm_eps), self.parts.head)

    def _run_layers(self, layers: Layers, batch: Batch) -> Tensor:
        """Return the hidden states [B, L, (T+1)*H] of a target that exposes its layers: large matmuls, no packing."""
        size = max(1, self._max_tokens(layers) // batch.token_ids.shape[1])  # texts per batch
        with torch.autocast(batch.token_ids.device.type, enabled=False):
            found = [
                self._collect_taps(layers, ids, positions)
                for ids, positions in zip(
                    torch.split(batch.token_ids, size), torch.split(batch.positions(), size), strict=True
                )
            ]
        return torch.cat(found).masked_fill_(~batch.is_text()[..., None], 0.0)

    def _max_tokens(self, layers: Layers) -> int:
        """Return how many tokens fit: the memory of a layer, and of the collected states."""
        if layers.device.type != "cuda":
            return LAYER_TOKENS
        wanted = 2 * (len(self._taps) + 1) * layers.config.hidden_size * layers.dtype.itemsize
        return min(LAYER_TOKENS, working_memory(layers.device) // (bytes_per_row(layers) + wanted))

    def _collect_taps(self, layers: Layers, token_ids: Tensor, positions: Tensor) -> Tensor:
        states = layers.states(token_ids, positions, lambda _, query, key, value: causal_attention(query, key, value))
        wanted = (*self._taps, self._last)
        found = {index: hidden for index, hidden in enumerate(states) if index in wanted}
        return torch.cat([found[index] for index in wanted], dim=-1)

    def _run_passes(self, batch: Batch) -> Tensor:
        """Return the same from ordinary forward passes, several texts per pass."""
        lengths = batch.lengths.tolist()
        rows = [ids[:length] for ids, length in zip(batch.token_ids.tolist(), lengths, strict=True)]
        layers = (*self._taps, self._last)
        found: list[Tensor] = []
        self.target.set_taps(layers)
        self.target.set_top(0)
        try:
            for group in group_texts(lengths, min(PASS_TOKENS, self.target.num_slots)):
                found += self._forward([rows[index] for index in group])
        finally:
            self.target.set_taps(())
        shape = (*batch.token_ids.shape, len(layers) * self.target.info.hidden_size)
        states = torch.zeros(shape, dtype=found[0].dtype, device=batch.token_ids.device)
        for row, state in zip(states, found, strict=True):
            row[: len(state)] = state
        return states

    def _forward(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return the hidden states [n, (T+1)*H] of each text."""
        sequences = [self.target.open(len(text)) for text in texts]
        try:
            segments = [
                Segment(sequence, text, chain_parents(len(text)), 0)
                for sequence, text in zip(sequences, texts, strict=True)
            ]
            taps = self.target.forward(segments).taps
            assert taps is not None
            parts = taps.split_with_sizes([len(text) for text in texts])
            return [part.to(self.target.info.dtype, copy=True) for part in parts]
        finally:
            for sequence in sequences:
                self.target.close(sequence)


def group_texts(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Group texts in order with at most ``max_tokens`` tokens per group. A longer text is a group of its own."""
    groups: list[list[int]] = []
    used = max_tokens
    for index, length in enumerate(lengths):
        if used + length > max_tokens:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += length
    return groups
