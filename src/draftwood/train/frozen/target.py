"""The target while its head is trained: it says what it thinks along texts, and nothing about it changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draftwood.heads import Head, float_logits
from draftwood.targets import Layers, Segment, Target, TargetParts, chain_parents
from draftwood.targets.native import rms_norm
from draftwood.train.attention import causal_attention
from draftwood.train.base import Batch, Signals
from draftwood.train.frozen.room import part_of_gpu, state_bytes

CHUNK = 4096  # tokens that one pass of the target takes
LAYER_TOKENS = 65536  # that go through its layers side by side, padding included; on a GPU those that fit


class FrozenTarget:
    """``taps``: the hidden states that the head reads, as ``Target.set_taps`` takes them."""

    def __init__(self, target: Target, taps: Sequence[int]) -> None:
        self.target = target
        self.parts: TargetParts = target.parts()
        self._taps = tuple(taps)
        self._last = target.info.num_layers

    @classmethod
    def of(cls, target: Target, head: Head) -> FrozenTarget:
        """For a head, which is bound to the target's embeddings and lm_head."""
        frozen = cls(target, head.config.taps_for(target.info.num_layers))
        head.bind(frozen.parts)
        return frozen

    @torch.no_grad()
    def signals(self, batch: Batch) -> Signals:
        """Runs all texts through the target."""
        layers = self.target.layers()
        states = self._by_passes(batch) if layers is None else self._by_layers(layers, batch)
        width = self.target.info.hidden_size
        return Signals(states[..., : -width or None], states[..., -width:])

    def logits(self, hidden: Tensor) -> Tensor:
        """What the target says behind ``hidden [..., H]``, float32 ``[..., V]``; no gradients."""
        with torch.no_grad():
            return float_logits(rms_norm(hidden, self.parts.norm, self.parts.norm_eps), self.parts.head)

    def _by_layers(self, layers: Layers, batch: Batch) -> Tensor:
        """The hidden states [B, L, (T+1)*H] from a target that lends its layers: large products over texts side by
        side, which the host neither packs nor waits for."""
        size = max(1, self._most_tokens(layers) // batch.token_ids.shape[1])  # texts that go together
        with torch.autocast(batch.token_ids.device.type, enabled=False):
            found = [
                self._tapped(layers, ids, positions)
                for ids, positions in zip(
                    torch.split(batch.token_ids, size), torch.split(batch.positions(), size), strict=True
                )
            ]
        return torch.cat(found).masked_fill_(~batch.is_text()[..., None], 0.0)

    def _most_tokens(self, layers: Layers) -> int:
        """That go together: what a layer holds of them, and the states that are wanted until they stand together."""
        if layers.device.type != "cuda":
            return LAYER_TOKENS
        wanted = 2 * (len(self._taps) + 1) * layers.config.hidden_size * layers.dtype.itemsize
        return min(LAYER_TOKENS, part_of_gpu(layers.device) // (state_bytes(layers) + wanted))

    def _tapped(self, layers: Layers, token_ids: Tensor, positions: Tensor) -> Tensor:
        states = layers.states(token_ids, positions, lambda _, query, key, value: causal_attention(query, key, value))
        wanted = (*self._taps, self._last)
        found = {index: hidden for index, hidden in enumerate(states) if index in wanted}
        return torch.cat([found[index] for index in wanted], dim=-1)

    def _by_passes(self, batch: Batch) -> Tensor:
        """The same from the target's own passes, several texts to one."""
        lengths = batch.lengths.tolist()
        rows = [ids[:length] for ids, length in zip(batch.token_ids.tolist(), lengths, strict=True)]
        layers = (*self._taps, self._last)
        found: list[Tensor] = []
        self.target.set_taps(layers)
        self.target.set_top(0)
        try:
            for group in groups_within(lengths, min(CHUNK, self.target.num_slots)):
                found += self._run([rows[index] for index in group])
        finally:
            self.target.set_taps(())
        shape = (*batch.token_ids.shape, len(layers) * self.target.info.hidden_size)
        states = torch.zeros(shape, dtype=found[0].dtype, device=batch.token_ids.device)
        for row, state in zip(states, found, strict=True):
            row[: len(state)] = state
        return states

    def _run(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Of each text its hidden states [n, (T+1)*H]."""
        sequences = [self.target.open(len(text)) for text in texts]
        try:
            segments = [
                Segment(sequence, text, chain_parents(len(text)), 0)
                for sequence, text in zip(sequences, texts, strict=True)
            ]
            taps = self.target.forward(segments).taps
            assert taps is not None
            return [part.clone() for part in taps.split_with_sizes([len(text) for text in texts])]
        finally:
            for sequence in sequences:
                self.target.close(sequence)


def groups_within(lengths: Sequence[int], most: int) -> list[list[int]]:
    """Texts that go through the target together, in order, with at most so many tokens; a longer one goes alone."""
    groups: list[list[int]] = []
    used = most
    for index, length in enumerate(lengths):
        if used + length > most:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += length
    return groups
