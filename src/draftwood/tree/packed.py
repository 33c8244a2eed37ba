"""Trees as columns of numbers, in the layout that C reads.

A forest holds the trees of one or many requests: four columns of integers (tokens, parents, depths, sources) and one of
probabilities. A tree is a range of all columns. Sources are numbered in the order of their first appearance.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from struct import Struct
from typing import NamedTuple

ROOT_SOURCE = "root"
COLUMNS = ("tokens", "parents", "depths", "sources", "probs")  # in this order; probabilities are stored apart

_PLACE = Struct("@4q")  # of a tree: nodes, address of their tokens, nodes per column, address of their probabilities


class _Numbers(dict[str, int]):
    """Numbers sources; the names are kept in order."""

    def __init__(self, *names: str) -> None:
        super().__init__((name, number) for number, name in enumerate(names))
        self.names = list(names)
        self._lock = threading.Lock()

    def __missing__(self, name: str) -> int:
        with self._lock:
            if name not in self:
                self.names.append(name)
                self[name] = len(self.names) - 1
            return self[name]


SOURCE_NUMBERS = _Numbers(ROOT_SOURCE)


def new_places(count: int) -> array[int]:
    """Memory for the places of ``count`` trees: int64 [count, 4]."""
    return array("q", bytes(_PLACE.size * count))


class Forest:
    """Memory for trees of ``capacity`` nodes in all."""

    __slots__ = ("address", "capacity", "ints", "probs", "probs_address")

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._hold(array("i", bytes(16 * capacity)), array("d", bytes(8 * capacity)))

    @classmethod
    def of(cls, columns: Iterable[Sequence[int]], sources: Sequence[str], probs: Sequence[float]) -> Forest:
        """One tree, from its tokens, parents, depths, sources and probabilities."""
        forest = object.__new__(cls)
        forest.capacity = len(sources)
        ints = array("i")
        for column in columns:
            ints.extend(column)
        ints.extend(map(SOURCE_NUMBERS.__getitem__, sources))
        forest._hold(ints, array("d", probs))
        return forest

    def _hold(self, ints: array[int], probs: array[float]) -> None:
        self.ints, self.probs = ints, probs  # [4 * capacity], [capacity]
        self.address, self.probs_address = ints.buffer_info()[0], probs.buffer_info()[0]


class PackedTree(NamedTuple):
    """The nodes of a forest from ``start`` on."""

    forest: Forest
    start: int
    size: int
    place: bytes  # ``Tree`` of compiled/trees.h

    @classmethod
    def at(cls, forest: Forest, start: int, size: int) -> PackedTree:
        place = _PLACE.pack(size, forest.address + 4 * start, forest.capacity, forest.probs_address + 8 * start)
        return cls(forest, start, size, place)

    @classmethod
    def all_at(cls, forest: Forest, places: array[int]) -> Iterator[PackedTree]:
        """Trees that C has written into a forest."""
        first, records = forest.address, places.tobytes()
        starts = [(address - first) // 4 for address in places[1::4]]
        own = [records[at : at + _PLACE.size] for at in range(0, len(records), _PLACE.size)]
        # Twice as fast as a loop: every cycle packs two trees a request.
        return map(tuple.__new__, repeat(cls), zip(repeat(forest), starts, places[::4], own, strict=False))

    def links(self) -> tuple[array[int], array[int]]:
        """Tokens and parents."""
        (forest, start, size, _) = self
        ints, parents = forest.ints, start + forest.capacity
        return ints[start : start + size], ints[parents : parents + size]

    def source_of(self, node: int) -> str:
        return SOURCE_NUMBERS.names[self.forest.ints[3 * self.forest.capacity + self.start + node]]

    def column(self, name: str) -> tuple[int, ...] | tuple[str, ...] | tuple[float, ...]:
        forest, start, size, _ = self
        if name == "probs":
            return tuple(forest.probs[start : start + size])
        start += COLUMNS.index(name) * forest.capacity
        values = forest.ints[start : start + size]
        return tuple([SOURCE_NUMBERS.names[number] for number in values]) if name == "sources" else tuple(values)
