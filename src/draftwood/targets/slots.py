"""Slot allocation of a KV cache: one pool of slots, allocated in contiguous extents.

An extent belongs to one sequence: slots ``base .. base + capacity``. The committed prefix comes first, then the nodes
of the pending tree, node i at ``base + length + i``. Subclasses of ``SlotBook`` store and move the data in the slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from draftwood.errors import CapabilityError
from draftwood.targets.base import Target

Move = Callable[[list[int], int], None]  # see SlotBook.move_rows


@dataclass(slots=True)
class Extent:
    base: int
    capacity: int
    length: int = 0  # committed positions
    parents: Sequence[int] = ()  # of the pending tree: nodes that are written but not committed

    @property
    def pending(self) -> int:
        return len(self.parents)


class SlotPool:
    """First-fit allocation of contiguous extents."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = [(0, num_slots)]  # (base, size), ascending, never adjacent

    def largest(self) -> int:
        return max((size for _, size in self._free), default=0)

    def take(self, size: int) -> int:
        for index, (base, free) in enumerate(self._free):
            if free >= size:
                rest = [(base + size, free - size)] if free > size else []
                self._free[index : index + 1] = rest
                return base
        raise CapabilityError(
            "The cache has no room for another sequence",
            got=f"{size} positions",
            allowed=f"at most {self.largest()} in one piece now, {self.num_slots} in all",
            next_step="Shorten the prompt or max_tokens, or raise cache_tokens.",
        )

    def resize(self, base: int, size: int, new_size: int) -> int | None:
        """Give an extent another size; return its new base. None if it does not fit.

        It stays where it is if it can. Otherwise it moves down, or to a place that does not overlap the old one.
        """
        before = self._free
        self.give(base, size)
        for index, (start, free) in enumerate(self._free):
            if start <= base and base + new_size <= start + free:
                pieces = (start, base - start), (base + new_size, start + free - base - new_size)
                self._free[index : index + 1] = [piece for piece in pieces if piece[1]]
                return base
        if self.largest() < new_size:
            self._free = before
            return None
        return self.take(new_size)

    def give(self, base: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (base, size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


class SlotBook(ABC):
    """Sequences and their extents. ``move``: a faster replacement for ``move_rows``."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._pool = SlotPool(num_slots)
        self._extents: dict[int, Extent] = {}
        self._next_id = 0

    @abstractmethod
    def move_rows(self, sources: list[int], first: int) -> None:
        """Moves the rows at the slots ``sources`` (ascending) to ``first``, ``first + 1``, ..."""

    def __getitem__(self, sequence: int) -> Extent:
        return self._extents[sequence]

    def can_open(self, capacity: int) -> bool:
        return capacity <= self._pool.largest()

    def open(self, capacity: int) -> int:
        base = self._pool.take(capacity)
        sequence, self._next_id = self._next_id, self._next_id + 1
        self._extents[sequence] = Extent(base, capacity)
        return sequence

    def close(self, sequence: int) -> None:
        extent = self._extents.pop(sequence)
        self._pool.give(extent.base, extent.capacity)

    def reserve(self, sequence: int, parents: Sequence[int], after: int = 0) -> Extent:
        """Reserves slots for new nodes after the first ``after`` nodes of the pending tree.

        Sets ``parents`` of the extent to those of the whole tree, without a copy if the tree is new.
        """
        extent = self._extents[sequence]
        if after:
            parents = _extend_tree(extent, parents, after)
        if extent.length + len(parents) > extent.capacity:
            raise CapabilityError(
                "The sequence outgrows its capacity in the cache",
                got=f"{extent.length} committed + {len(parents)} nodes",
                allowed=f"{extent.capacity} positions",
                next_step="Open the sequence with a larger capacity.",
            )
        extent.parents = parents
        return extent

    def keep(self, sequence: int, nodes: Sequence[int], move: Move | None = None) -> None:
        """Appends the accepted nodes to the prefix. Node ids on a path ascend, so rows only move down."""
        extent = self._extents[sequence]
        size, pending = len(nodes), len(extent.parents)
        if 0 < size <= pending and nodes[0] == 0 and nodes[-1] == size - 1:  # the first ones: nothing moves
            extent.length += size
            extent.parents = ()
            return
        if nodes and not 0 <= min(nodes) <= max(nodes) < pending:
            raise CapabilityError(
                "Only nodes of the pending tree can be kept", got=list(nodes), allowed=f"0 to {pending - 1}"
            )
        start = 0
        while start < size and nodes[start] == start:
            start += 1
        if start < size:  # all rows after the first gap move
            first = extent.base + extent.length
            (move or self.move_rows)([first + node for node in nodes[start:]], first + start)
        extent.length += size
        extent.parents = ()

    def truncate(self, sequence: int, length: int) -> None:
        extent = self._extents[sequence]
        extent.length = min(extent.length, length)
        extent.parents = ()

    def resize(self, sequence: int, capacity: int, move: Move | None = None) -> bool:
        extent = self._extents[sequence]
        _check_capacity(capacity, extent.length)
        base = self._pool.resize(extent.base, extent.capacity, capacity)
        if base is None:
            return False
        if base != extent.base and extent.length:
            (move or self.move_rows)(list(range(extent.base, extent.base + extent.length)), base)
        extent.base, extent.capacity, extent.parents = base, capacity, ()
        return True

    def fork(self, sequence: int, capacity: int, length: int | None = None, move: Move | None = None) -> int:
        source = self._extents[sequence]
        length = source.length if length is None else min(length, source.length)
        _check_capacity(capacity, length)
        copy = self.open(capacity)
        extent = self._extents[copy]
        extent.length = length
        if length:
            (move or self.move_rows)(list(range(source.base, source.base + length)), extent.base)
        return copy


class SlotTarget(Target):
    """A target whose sequences live in a ``SlotBook``."""

    _cache: SlotBook

    @property
    def num_slots(self) -> int:
        return self._cache.num_slots

    def open(self, capacity: int) -> int:
        return self._cache.open(capacity)

    def can_open(self, capacity: int) -> bool:
        return self._cache.can_open(capacity)

    def close(self, sequence: int) -> None:
        self._cache.close(sequence)

    def length(self, sequence: int) -> int:
        return self._cache[sequence].length

    def truncate(self, sequence: int, length: int) -> None:
        self._cache.truncate(sequence, length)


def _check_capacity(capacity: int, length: int) -> None:
    if capacity < length:
        raise CapabilityError("The capacity is too small for the prefix", got=capacity, allowed=f"{length} or more")


def _extend_tree(extent: Extent, parents: Sequence[int], after: int) -> Sequence[int]:
    """Returns the parents of the whole tree."""
    if not 0 <= after <= extent.pending:
        raise CapabilityError(
            "A tree can only continue after nodes that are pending",
            got=f"after {after} nodes",
            allowed=f"0 to {extent.pending}",
            next_step="Run the missing nodes first; keep and truncate drop the pending tree.",
        )
    return [*extent.parents[:after], *parents]
