"""What came of the trees of several requests, as C reads it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from draftwood.tree import DraftTree, pack_places


class OutcomesMemory(NamedTuple):
    """What C functions read that learn from outcomes."""

    places: bytes  # of the trees
    path_lengths: array[int]  # int64
    path_nodes: array[int]  # int32: of all paths, one after the other
    emitted_lengths: array[int]
    emitted_tokens: array[int]

    @property
    def arguments(self) -> tuple[bytes, int, int, int, int]:
        """In the order of C functions: addresses, valid as long as this object."""
        _, *parts = self
        path_lengths, path_nodes, emitted_lengths, emitted_tokens = [part.buffer_info()[0] for part in parts]
        return self.places, path_lengths, path_nodes, emitted_lengths, emitted_tokens


class Outcomes:
    """Verified trees with their accepted paths, root first, and the tokens that were emitted."""

    def __init__(
        self,
        trees: Sequence[DraftTree],
        paths: Sequence[Sequence[int]],
        emitted: Sequence[Sequence[int]],
        memory: OutcomesMemory | None = None,
    ) -> None:
        """``memory``: the same, if it is there already."""
        self.trees, self.paths, self.emitted = trees, paths, emitted
        self._memory = memory

    @property
    def memory(self) -> OutcomesMemory:
        if self._memory is None:
            self._memory = self._pack()
        return self._memory

    def _pack(self) -> OutcomesMemory:
        places = pack_places(self.trees)
        packed = [
            (array("q", map(len, parts)), array("i", list(chain.from_iterable(parts))))
            for parts in (self.paths, self.emitted)
        ]
        return OutcomesMemory(places, *packed[0], *packed[1])
