"""The decoder contract: the eager decoder in torch and the fused ones for CPUs and GPUs implement it.

All use the same weights, the same cache layout and the same result record, so the native target can use any of them.
"""

from abc import ABC, abstractmethod
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from draftwood.errors import OptionError
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


NUM_FIELDS = 5  # of a segment in a packed batch
DRAW_FIELDS = 6  # of a token to draw, float64: row of logits, temperature, top_k, top_p, min_p, random number


class DrawList(NamedTuple):
    """The tokens that a batch asks to draw."""

    fields: "array[float]"  # [n, DRAW_FIELDS]
    outputs: "array[int]"  # [n] for which of the wanted rows


class PackedBatch:
    """The trees of all sequences, packed."""

    def __init__(
        self,
        token_ids: "array[int]",
        parents: "array[int]",
        fields: Sequence[int],
        draws: Sequence[Draw | None],
        num_wanted: int,
    ) -> None:
        self.token_ids = token_ids  # [N] int32
        self.parents = parents  # int32, of the whole pending trees, one after the other
        self.fields = fields  # [segments * 5] base, prefix_len, after, size, num_logits: as in ``PackedSegment``
        self.draws = draws  # of the segments; empty: none
        self.num_wanted = num_wanted  # R, rows to compute logits for

    @classmethod
    def of(cls, token_ids: Sequence[int], segments: Sequence[PackedSegment]) -> "PackedBatch":
        """Packs segments that have their rows and slots."""
        parents, fields = array("i"), list[int]()
        for segment in segments:
            parents.extend(segment.parents)
            fields += (segment.base, segment.prefix_len, segment.after, segment.size, segment.num_logits)
        return cls(array("i", token_ids), parents, fields, (), sum([segment.num_logits for segment in segments]))

    @property
    def num_segments(self) -> int:
        return len(self.fields) // NUM_FIELDS

    @cached_property
    def segments(self) -> list[PackedSegment]:
        """For what reads them one by one: a GPU pass reads the fields."""
        found, start, first = list[PackedSegment](), 0, 0
        columns = [self.fields[column::NUM_FIELDS] for column in range(NUM_FIELDS)]
        for base, prefix_len, after, size, num_logits in zip(*columns, strict=True):
            end = first + after + size
            found.append(PackedSegment(start, base, prefix_len, self.parents[first:end], num_logits, after))
            start, first = start + size, end
        return found

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
    keeps_taps: bool = False  # as in TargetInfo
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
    token_ids, parents, fields = array("i"), array("i"), list[int]()
    draws, num_wanted, reserve = list[Draw | None](), 0, cache.reserve
    for sequence, own_ids, own_parents, num_logits, after, draw in segments:
        extent = reserve(sequence, own_parents, after)
        try:
            token_ids.extend(own_ids)
        except OverflowError:
            raise OptionError("A token id is outside the vocabulary", got=f"ids up to {max(own_ids)}") from None
        parents.extend(extent.parents)
        fields += (extent.base, extent.length, after, len(own_ids), num_logits)
        num_wanted += num_logits
        draws.append(draw)
    return PackedBatch(token_ids, parents, fields, draws if any(draws) else (), num_wanted)
