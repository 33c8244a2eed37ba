"""The key/value cache of the native target: one preallocated pool of slots, handed out in contiguous extents.

An extent belongs to one sequence: slots ``base .. base + capacity``. Its committed prefix comes first; the nodes of the
tree under verification stand behind it, node i at ``base + length + i``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftwood.errors import CapabilityError

Move = Callable[[list[int], int], None]  # see KVCache.move_rows; a decoder may know a faster way


@dataclass(slots=True)
class Extent:
    base: int
    capacity: int
    length: int = 0  # committed positions
    pending: int = 0  # nodes of the last forward, not committed yet


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

    def give(self, base: int, size: int) -> None:
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (base, size)]):
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged


class KVCache:
    """Keys and values of every layer, ``[layers, kv_heads, slots, head_dim]``: one head's keys lie in one piece."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_kv_heads, num_slots, head_dim)
        # Pages of an untouched CPU allocation cost nothing until a sequence writes there.
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.pool = SlotPool(num_slots)
        self._extents: dict[int, Extent] = {}
        self._next_id = 0

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def __getitem__(self, sequence: int) -> Extent:
        return self._extents[sequence]

    def open(self, capacity: int) -> int:
        base = self.pool.take(capacity)
        sequence = self._next_id
        self._next_id += 1
        self._extents[sequence] = Extent(base, capacity)
        return sequence

    def close(self, sequence: int) -> None:
        extent = self._extents.pop(sequence)
        self.pool.give(extent.base, extent.capacity)

    def reserve(self, sequence: int, num_nodes: int) -> int:
        """The slot of the first of ``num_nodes`` nodes that are about to be written."""
        extent = self._extents[sequence]
        if extent.length + num_nodes > extent.capacity:
            raise CapabilityError(
                "The sequence outgrows its part of the cache",
                got=f"{extent.length} committed + {num_nodes} nodes",
                allowed=f"{extent.capacity} positions",
            )
        extent.pending = num_nodes
        return extent.base + extent.length

    def keep(self, sequence: int, nodes: Sequence[int], move: Move | None = None) -> None:
        """Moves the accepted nodes' rows to the end of the prefix. A path ascends, so rows only move down."""
        extent = self._extents[sequence]
        first = extent.base + extent.length
        start = next((i for i, node in enumerate(nodes) if i != node), len(nodes))  # from the first gap on all move
        if start < len(nodes):
            (move or self.move_rows)([first + node for node in nodes[start:]], first + start)
        extent.length += len(nodes)
        extent.pending = 0

    def move_rows(self, sources: list[int], first: int) -> None:
        """The rows ``sources`` (ascending) of every plane to ``first``, ``first + 1``, ..."""
        index = torch.tensor(sources, device=self.keys.device)
        for rows in (self.keys, self.values):
            rows[:, :, first : first + len(sources)] = rows[:, :, index]

    def truncate(self, sequence: int, length: int) -> None:
        extent = self._extents[sequence]
        extent.length = min(extent.length, length)
        extent.pending = 0

    def fork(self, sequence: int, capacity: int) -> int:
        source = self._extents[sequence]
        if capacity < source.length:
            raise CapabilityError(
                "A copy of the sequence would not fit", got=f"{source.length} positions", allowed=f"{capacity}"
            )
        copy = self.open(capacity)
        extent = self._extents[copy]
        extent.length = source.length
        for rows in (self.keys, self.values):
            rows[:, :, extent.base : extent.base + source.length] = rows[
                :, :, source.base : source.base + source.length
            ]
        return copy
