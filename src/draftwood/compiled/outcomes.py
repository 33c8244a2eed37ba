"""What came of the trees of several requests, as C reads it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from draftwood.tree import DraftTree


class OutcomesMemory(NamedTuple):
    """Addresses and bytes for C, and the memory that the addresses point to."""

    places: bytes  # of the trees
    path_lengths: int
    path_nodes: int  # of all paths, one after the other
    emitted_lengths: int
    emitted_tokens: int
    kept: tuple[array[int], ...]

    @property
    def arguments(self) -> tuple[bytes, int, int, int, int]:
        """In the order of C functions that learn from outcomes."""
        return self.places, self.path_lengths, self.path_nodes, self.emitted_lengths, self.emitted_tokens


class Outcomes:
    """Verified trees with their accepted paths, root first, and the tokens that were emitted."""

    def __init__(
        self, trees: Sequence[DraftTree], paths: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]]
    ) -> None:
        self.trees, self.paths, self.emitted = trees, paths, emitted
        self._memory: OutcomesMemory | None = None

    @property
    def memory(self) -> OutcomesMemory:
        if self._memory is None:
            self._memory = self._pack()
        return self._memory

    def _pack(self) -> OutcomesMemory:
        places = b"".join([tree.pack().place for tree in self.trees])
        lengths = [array("q", map(len, parts)) for parts in (self.paths, self.emitted)]
        values = [array("i", list(chain.from_iterable(parts))) for parts in (self.paths, self.emitted)]
        kept = (*lengths, *values)
        path_lengths, emitted_lengths, path_nodes, emitted_tokens = [part.buffer_info()[0] for part in kept]
        return OutcomesMemory(places, path_lengths, path_nodes, emitted_lengths, emitted_tokens, kept)
