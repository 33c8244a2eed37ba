"""Predictions of a draft model in C: owns their memory and calls the functions of hints.h."""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_uint64

import numpy as np
import numpy.typing as npt

from draftwood.compiled.core import Core
from draftwood.compiled.found import found_record
from draftwood.targets import Found

MAX_DRAFTED, DRAFTED_WIDTH = 160, 16  # as in hints.h


class _DraftedRecord(ctypes.Structure):
    _fields_ = (
        ("count", c_int64),
        ("keys", c_uint64 * MAX_DRAFTED),
        ("widths", c_int64 * MAX_DRAFTED),
        ("tokens", c_int32 * DRAFTED_WIDTH * MAX_DRAFTED),
        ("scores", c_float * DRAFTED_WIDTH * MAX_DRAFTED),
    )


class CompiledDrafted:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._record = _DraftedRecord()
        self.address = ctypes.addressof(self._record)

    def clear(self) -> None:
        self._record.count = 0

    def add(self, tail: Sequence[int], ids: npt.NDArray[np.int32], scores: npt.NDArray[np.float32]) -> None:
        text = array("i", tail)
        rows = len(ids), ids.ctypes.data, scores.ctypes.data
        self._core.add_drafted(self.address, text.buffer_info()[0], len(text), *rows)

    def add_found(self, tail: Sequence[int], found: Found) -> None:
        text, record = array("i", tail), found_record(found)
        self._core.add_found(self.address, text.buffer_info()[0], len(text), ctypes.addressof(record))
