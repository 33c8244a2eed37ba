"""The decoder contract: the eager decoder in torch and the fused ones for CPUs and GPUs implement it.

All use the same weights, the same cache layout and the same result record, so the native target can use any of them.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from draftwood.targets.base import Draw, FinishedPass, ForwardOutput, PendingPass, Segment, depths_of
from draftwood.targets.cache import KVCache
from draftwood.targets.searches import Found, SearchPlan


class PackedSegment(NamedTuple):
    """One sequence's part of a packed batch."""

    start: int  # first row in the packed batch
    base: int  # first cache slot of the sequence
    prefix_len: int  # committed positions; node i of the tree is written to slot base + prefix_len + i
    parents: Sequence[int]  # [after + n] of the whole pending tree, -1 for node 0
    num_logits: int
    after: int = 0  # nodes written by earlier passes; the others are the segment's own

    @property
    def size(self) -> int:
        """Number of rows: the nodes that this pass writes."""
        return len(self.parents) - self.after

    @property
    def rows(self) -> slice:
        """Rows in the packed batch."""
        return slice(self.start, self.start + self.size)

    @property
    def first_slot(self) -> int:
        """Slot of its first own node."""
        return self.base + self.prefix_len + self.after


DRAW_FIELDS = 6  # of a token to draw, float64: row of logits, temperature, top_k, top_p, min_p, random number


class DrawList(NamedTuple):
    """The tokens that a batch asks to draw."""

    fields: "array[float]"  # [n, DRAW_FIELDS]
    outputs: "array[int]"  # [n] for which of the wanted rows


class PackedBatch(NamedTuple):
    """The trees of all sequences, packed."""

    token_ids: list[int]  # [N]
    segments: list[PackedSegment]
    draws: Sequence[Draw | None] = ()  # of the segments; empty: none

    def positions(self) -> list[int]:
        """[N] The position of each node in its sequence."""
        return [s.prefix_len + depth for s in self.segments for depth in depths_of(s.parents)[s.after :]]

    def logit_rows(self) -> list[int]:
        """[R] The rows to compute logits for, ascending."""
        ends = [(s.rows.stop, s.num_logits) for s in self.segments]
        return [row for end, wanted in ends for row in range(end - wanted, end)]

    def list_draws(self, *, is_selected: bool) -> DrawList:
        """``is_selected``: there are logits for the wanted rows only, not for all."""
        found, output = DrawList(array("d"), array("q")), 0
        for segment, draw in zip(self.segments, self.draws, strict=bool(self.draws)):
            if draw is not None:
                first = output if is_selected else segment.rows.stop - segment.num_logits
                for row, number in enumerate(draw.numbers(), start=first):
                    found.fields.extend((row, *draw.rule, number))
                found.outputs.extend(range(output, output + segment.num_logits))
            output += segment.num_logits
        return found


class Decoder(ABC):
    name: str
    is_exact: bool = False  # as in TargetInfo
    can_draw: bool = False  # as in TargetInfo
    pass_sizes: tuple[int, ...] = ()  # as in TargetInfo
    num_lanes: int = 1  # as in Target
    num_best: int = 0  # top entries to find in each row of logits; a hint, see Target.set_top

    @property
    def num_prepared(self) -> int:
        """As in ``Target``."""
        return 0

    @abstractmethod
    def forward(self, batch: PackedBatch, tap_layers: tuple[int, ...]) -> ForwardOutput:
        """Writes keys and values of all rows; returns the requested logits and the taps."""

    def launch(self, batch: PackedBatch, tap_layers: tuple[int, ...], lane: int) -> PendingPass:
        """Like ``Target.launch``, for decoders with several lanes."""
        return FinishedPass(self.forward(batch, tap_layers))

    def grow(self, batch: PackedBatch, plan: SearchPlan) -> list[Found] | None:
        """Like ``Target.grow``."""
        return None

    def ready_sizes(self, num_segments: int) -> tuple[int, ...]:
        """Like ``Target.ready_sizes``."""
        return ()

    @abstractmethod
    def move_rows(self, sources: list[int], first: int) -> None:
        """Like ``KVCache.move_rows``, as fast as this decoder can."""


def pack(segments: Sequence[Segment], cache: KVCache) -> PackedBatch:
    """Packs the segments and reserves their cache slots."""
    token_ids: list[int] = []
    packed: list[PackedSegment] = []
    for segment in segments:
        sequence, own_ids, parents, num_logits, after, _ = segment
        extent = cache.reserve(sequence, parents, after)
        packed.append(PackedSegment(len(token_ids), extent.base, extent.length, extent.parents, num_logits, after))
        token_ids.extend(own_ids)
    draws = [segment.draw for segment in segments]
    return PackedBatch(token_ids, packed, draws if any(draws) else ())
