"""What computes a packed batch: the eager decoder in torch, or a fused one for CPUs or GPUs.

All read the same weights, write the same cache layout and answer with the same record; the native target does not care
which of them it holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from draftwood.targets.base import FinishedPass, ForwardOutput, PendingPass, Segment, depths_of
from draftwood.targets.cache import KVCache


class PackedSegment(NamedTuple):
    """One sequence's part of a packed row."""

    start: int  # its first row in the packed batch
    base: int  # first cache slot of the sequence
    prefix_len: int  # committed positions; node i of the tree is written to slot base + prefix_len + i
    parents: Sequence[int]  # [after + n] of the whole pending tree, -1 at node 0
    num_logits: int
    after: int = 0  # nodes that earlier passes have written; the others are the segment's own

    @property
    def size(self) -> int:
        """Its rows: the nodes that this pass writes."""
        return len(self.parents) - self.after

    @property
    def rows(self) -> slice:
        """Its rows in the packed batch."""
        return slice(self.start, self.start + self.size)

    @property
    def first_slot(self) -> int:
        """Where its first own node is written."""
        return self.base + self.prefix_len + self.after


class PackedBatch(NamedTuple):
    """The trees of all sequences side by side."""

    token_ids: list[int]  # [N]
    segments: list[PackedSegment]

    def positions(self) -> list[int]:
        """[N] Where each node stands in its sequence's text."""
        return [s.prefix_len + depth for s in self.segments for depth in depths_of(s.parents)[s.after :]]

    def logit_rows(self) -> list[int]:
        """[R] The rows whose logits are wanted, ascending."""
        ends = [(s.rows.stop, s.num_logits) for s in self.segments]
        return [row for end, wanted in ends for row in range(end - wanted, end)]


class Decoder(ABC):
    name: str
    pass_sizes: tuple[int, ...] = ()  # as in TargetInfo
    num_lanes: int = 1  # as in Target
    num_best: int = 0  # best entries of each row of logits that are wanted with them; a hint, see Target.set_top

    @abstractmethod
    def forward(self, batch: PackedBatch, tap_layers: tuple[int, ...]) -> ForwardOutput:
        """Writes keys and values of all rows, returns logits of the wanted ones, and the taps."""

    def launch(self, batch: PackedBatch, tap_layers: tuple[int, ...], lane: int) -> PendingPass:
        """As ``Target.launch``, for decoders with several lanes."""
        return FinishedPass(self.forward(batch, tap_layers))

    @abstractmethod
    def move_rows(self, sources: list[int], first: int) -> None:
        """As ``KVCache.move_rows``, the quickest way this decoder knows."""


def pack(segments: Sequence[Segment], cache: KVCache) -> PackedBatch:
    """Lays the segments side by side and reserves their cache slots."""
    token_ids: list[int] = []
    packed: list[PackedSegment] = []
    for segment in segments:
        sequence, own_ids, parents, num_logits, after = segment
        extent = cache.reserve(sequence, parents, after)
        packed.append(PackedSegment(len(token_ids), extent.base, extent.length, extent.parents, num_logits, after))
        token_ids.extend(own_ids)
    return PackedBatch(token_ids, packed)
