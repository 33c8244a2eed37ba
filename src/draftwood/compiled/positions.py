"""Predictions for the next positions in C: owns their memory and calls the functions of hints.h."""

import ctypes
from array import array
from ctypes import c_double, c_int32, c_int64

import numpy as np

from draftwood.compiled.blend import Harvest
from draftwood.compiled.core import Core

NUM_LEVELS, LEVEL_WIDTH = 8, 12  # as in hints.h


class _PositionsRecord(ctypes.Structure):
    _fields_ = (
        ("counts", c_int64 * NUM_LEVELS),
        ("tokens", c_int32 * LEVEL_WIDTH * NUM_LEVELS),
        ("shares", c_double * LEVEL_WIDTH * NUM_LEVELS),
    )


class CompiledPositions:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._record = _PositionsRecord()
        self.address = ctypes.addressof(self._record)

    def note(self, seen: Harvest) -> None:
        tree = seen.tree
        parents, depths, path = (array("i", column) for column in (tree.parents, tree.depths, seen.path))
        chances = array("d", tree.probs)
        ids, scores = np.ascontiguousarray(seen.ids), np.ascontiguousarray(seen.scores)
        columns = [column.buffer_info()[0] for column in (parents, depths, chances)]
        rows = ids.shape[1], ids.ctypes.data, scores.ctypes.data
        accepted = len(path), path.buffer_info()[0], seen.num_emitted
        if self._core.note_positions(self.address, len(tree), *columns, *accepted, *rows):
            raise MemoryError(f"a tree of {len(tree)} nodes")
