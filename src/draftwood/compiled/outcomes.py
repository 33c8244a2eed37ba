"""What came of the trees of several requests, as C reads it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from draftwood.tree import DraftTree


class OutcomesMemory(NamedTuple):
    """Addresses for C, and the memory that they point to."""

    places: int  # of the trees
    path_lengths: int
    path_nodes: int  # of all paths, one after the other
    emitted_lengths: int
    emitted_tokens: int
    kept: tuple[array[int], ...]


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
        places, paths, tokens = list[int](), list[int](), list[int]()
        for tree, path, emitted in zip(self.trees, self.paths, self.emitted, strict=True):
            places += tree.pack().place
            paths += path
            tokens += emitted
        path_lengths, emitted_lengths = array("q", map(len, self.paths)), array("q", map(len, self.emitted))
        kept = array("q", places), path_lengths, array("i", paths), emitted_lengths, array("i", tokens)
        first, second, third, fourth, fifth = [part.buffer_info()[0] for part in kept]
        return OutcomesMemory(first, second, third, fourth, fifth, kept)
