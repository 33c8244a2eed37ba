"""Trees as columns of numbers, in the layout that C reads.

A forest holds the trees of one or many requests: four columns of integers (tokens, parents, depths, sources) and one of
probabilities. A tree is a range of all columns. Sources are numbered in the order of their first appearance.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence
from struct import Struct

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


_NO_INTS, _NO_FLOATS = array("i", [0]), array("d", [0.0])


class Forest:
    """Memory for trees, and where each of them is. A tree is known by its number."""

    __slots__ = ("address", "capacity", "ints", "places", "probs", "probs_address", "records", "starts")

    def __init__(self, capacity: int, num_trees: int) -> None:
        """``capacity``: nodes in all."""
        self.capacity = capacity
        self._hold(_NO_INTS * (4 * capacity), _NO_FLOATS * capacity)
        self.places = array("q", bytes(_PLACE.size * num_trees))  # [T, 4] ``Tree`` of compiled/trees.h: C writes them

    @classmethod
    def of(cls, columns: Iterable[Sequence[int]], sources: Sequence[str], probs: Sequence[float]) -> Forest:
        """One tree, from its tokens, parents, depths, sources and probabilities."""
        forest, size = object.__new__(cls), len(sources)
        forest.capacity = size
        ints = array("i")
        for column in columns:
            ints.extend(column)
        ints.extend(map(SOURCE_NUMBERS.__getitem__, sources))
        forest._hold(ints, array("d", probs))
        forest.place_first(size)
        forest.list_sizes()
        return forest

    def _hold(self, ints: array[int], probs: array[float]) -> None:
        self.ints, self.probs = ints, probs  # [4 * capacity], [capacity]
        self.address, self.probs_address = ints.buffer_info()[0], probs.buffer_info()[0]

    def place_first(self, size: int) -> None:
        """The only tree has so many nodes, from the first place on."""
        self.places = array("q", (size, self.address, self.capacity, self.probs_address))

    def list_sizes(self) -> array[int]:
        """Sizes of the trees, once their places are written."""
        places, first, width = self.places, self.address, self.ints.itemsize
        self.records = places.tobytes()
        self.starts = [(address - first) // width for address in places[1::4]]  # by tree, in a column
        return places[::4]

    def place_of(self, number: int) -> bytes:
        """Where a tree is, as C reads it."""
        return self.records[_PLACE.size * number : _PLACE.size * (number + 1)]

    def links(self, number: int, size: int) -> tuple[array[int], array[int]]:
        """Tokens and parents of a tree."""
        ints, start = self.ints, self.starts[number]
        parents = start + self.capacity
        return ints[start : start + size], ints[parents : parents + size]

    def source_of(self, number: int, node: int) -> str:
        return SOURCE_NUMBERS.names[self.ints[3 * self.capacity + self.starts[number] + node]]

    def column(self, name: str, number: int, size: int) -> tuple[int, ...] | tuple[str, ...] | tuple[float, ...]:
        start = self.starts[number]
        if name == "probs":
            return tuple(self.probs[start : start + size])
        start += COLUMNS.index(name) * self.capacity
        values = self.ints[start : start + size]
        return tuple([SOURCE_NUMBERS.names[source] for source in values]) if name == "sources" else tuple(values)
