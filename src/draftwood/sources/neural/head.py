"""Draft heads as draft models: EAGLE and EAGLE-3 with their own cache, Medusa and Hydra by depth.

EAGLE heads run over tokens and features. The features of a text node come from the target's hidden states; those of a
draft node are the head's output for its parent, stored by cache slot. Accepted nodes are computed again from the
target's features, since they were computed from predicted ones: `keeps_drafts` is False.

Medusa and Hydra heads read the hidden state before the root. Their prediction after a node depends on its depth and,
for Hydra, on the tokens of its path.
"""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwood.heads import Eagle3Head, EagleHead, Head, HydraHead, MedusaHead
from draftwood.sources.neural.base import DraftModel, DraftSegment
from draftwood.targets import KVCache, TopRows, top_rows
from draftwood.targets.native import CacheAttention, PackedBatch, PackedSegment, pack


class HeadModel(DraftModel):
    """Base of all heads: the cache, and the hidden state of every slot."""

    keeps_drafts = False

    def __init__(self, head: Head, taps: tuple[int, ...], num_slots: int) -> None:
        config, device = head.config, head.parts.embed.device
        dtype = next(head.parameters()).dtype
        self.taps = taps
        self.max_positions = num_slots
        self._head = head
        self._device = device
        self._dtype = dtype
        layers, heads, dim = (
            (config.num_layers, config.num_kv_heads, config.head_dim) if config.num_layers else (0, 1, 1)
        )
        self._cache = KVCache(layers, heads, dim, num_slots, dtype, device)
        self._hidden = torch.empty(num_slots, config.hidden_size, dtype=dtype, device=device)  # by slot

    def open(self, capacity: int) -> int | None:
        return self._cache.open(capacity) if self._cache.can_open(capacity) else None

    def close(self, sequence: int) -> None:
        self._cache.close(sequence)

    def keep(self, sequence: int, nodes: Sequence[int]) -> None:
        self._cache.keep(sequence, nodes)

    @torch.inference_mode()
    def forward(self, segments: Sequence[DraftSegment], k: int) -> TopRows:
        batch = pack([each.segment for each in segments], self._cache)
        logits = self._logits(batch, [each.gather() for each in segments])  # [R, Vd]
        top = self._top(logits, min(k, logits.shape[1]))
        if self._head.config.has_draft_vocabulary:
            return top.renamed(self._vocabulary)
        return top

    def _top(self, logits: Tensor, k: int) -> TopRows:
        """The top k entries of each row."""
        return top_rows(logits, k)

    @abstractmethod
    def _logits(self, batch: PackedBatch, features: Sequence[Tensor | None]) -> Tensor:
        """Logits after the requested rows, [R, Vd]."""

    @cached_property
    def _vocabulary(self) -> npt.NDArray[np.int32]:
        """Target token ids by draft token id, [Vd], on the host."""
        assert isinstance(self._head, Eagle3Head)
        return self._head.vocabulary().to("cpu", torch.int32).numpy()

    def _convert(self, states: Tensor) -> Tensor:
        """Convert target tensors to the head's dtype and device."""
        return states.to(self._device, self._dtype)

    def _index(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)


class EagleModel(HeadModel):
    """EAGLE and EAGLE-3: one pass through the head's layers."""

    _head: EagleHead | Eagle3Head

    def _logits(self, batch: PackedBatch, features: Sequence[Tensor | None]) -> Tensor:
        head = self._head
        embeds = self._convert(head.embed(self._index(batch.token_ids)))  # [N, Ht]
        attend = CacheAttention(self._cache, batch.segments)
        hidden = head(embeds, self._given(batch, features), self._index(batch.positions()), attend)  # [N, H]
        self._store(batch, hidden)
        return head.logits(hidden[self._index(batch.logit_rows())])

    def _given(self, batch: PackedBatch, features: Sequence[Tensor | None]) -> Tensor:
        """The features that the rows read, [N, H]: the target's, or what was stored at their parents."""
        return torch.cat(
            [
                self._hidden[self._index(slots_above(segment))] if own is None else self._head.fuse(self._convert(own))
                for segment, own in zip(batch.segments, features, strict=True)
            ]
        )

    def _store(self, batch: PackedBatch, hidden: Tensor) -> None:
        for segment in batch.segments:
            self._hidden[segment.first_slot : segment.first_slot + segment.size] = hidden[segment.rows]


class AheadModel(HeadModel):
    """Medusa and Hydra: text nodes store a hidden state; predictions after a node use that of its root."""

    _head: MedusaHead | HydraHead

    def __init__(self, head: MedusaHead | HydraHead, taps: tuple[int, ...], num_slots: int) -> None:
        super().__init__(head, taps, num_slots)
        self.max_depth = head.config.num_heads_ahead
        self._tokens = [0] * num_slots  # by slot

    def _logits(self, batch: PackedBatch, features: Sequence[Tensor | None]) -> Tensor:
        paths: list[list[int]] = []  # for every requested row, the slots from its root to its node
        text: list[tuple[PackedSegment, Tensor]] = []
        for segment, own in zip(batch.segments, features, strict=True):
            slot = segment.first_slot
            self._tokens[slot : slot + segment.size] = batch.token_ids[segment.rows]
            if own is None:
                paths += [_slots_down_to(node, segment) for node in _requested_nodes(segment)]
            else:
                text.append((segment, own))
                paths += [[segment.base + segment.prefix_len + node] for node in _requested_nodes(segment)]
        if text:
            self._read_text(text)
        logits = torch.full((len(paths), self._head.config.vocab_size), float("-inf"), device=self._device)
        for depth in {len(path) for path in paths if len(path) <= self._head.config.num_heads_ahead}:
            rows = [row for row, path in enumerate(paths) if len(path) == depth]
            tokens = [[self._tokens[slot] for slot in paths[row]] for row in rows]
            hidden = self._hidden[self._index([paths[row][0] for row in rows])]  # [m, H]
            embeds = self._convert(self._head.embed(torch.tensor(tokens, device=self._device)))  # [m, depth, H]
            logits[self._index(rows)] = self._head.logits_at(depth, hidden, embeds)
        return logits

    def _read_text(self, text: Sequence[tuple[PackedSegment, Tensor]]) -> None:
        """Store the hidden states of text nodes."""
        starts = list(accumulate((segment.size for segment, _ in text), initial=0))
        segments = [segment._replace(start=start) for start, (segment, _) in zip(starts, text, strict=False)]
        positions = self._index(PackedBatch.of([], segments).positions())
        features = self._head.fuse(self._convert(torch.cat([own for _, own in text])))  # [N, H]
        hidden = self._head(features, positions, CacheAttention(self._cache, segments))
        for segment in segments:
            self._hidden[segment.first_slot : segment.first_slot + segment.size] = hidden[segment.rows]


def _requested_nodes(segment: PackedSegment) -> range:
    """The nodes whose logits are requested."""
    return range(len(segment.parents) - segment.num_logits, len(segment.parents))


def _slots_down_to(node: int, segment: PackedSegment) -> list[int]:
    """The slots from the root, which is the last text token, to a node of the tree."""
    path = [node]
    while path[-1] >= 0:
        path.append(segment.parents[path[-1]])
    return [segment.base + segment.prefix_len + node for node in reversed(path)]


def slots_above(segment: PackedSegment) -> list[int]:
    """Slots of the parents of the segment's nodes; the first nodes follow the last text token."""
    return [segment.base + segment.prefix_len + parent for parent in segment.parents[segment.after :]]
