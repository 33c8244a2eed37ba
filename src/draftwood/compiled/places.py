"""The index of a text in C: owns its memory and calls the functions of places.h."""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import numpy as np

from draftwood.compiled.core import Core

FIRST_PLACES = 1024


class _PlacesRecord(ctypes.Structure):
    _fields_ = (("size", c_int64), ("tokens", c_void_p), ("before", c_void_p), ("bits", c_int64), ("slots", c_void_p))


class CompiledPlaces:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._record = _PlacesRecord()
        self.address = ctypes.addressof(self._record)
        self._tokens = self._before = np.empty(0, np.int32)

    def extend(self, tokens: Sequence[int]) -> None:
        self._reserve(len(tokens))
        new = array("i", tokens)
        self._core.add_places(self.address, len(new), new.buffer_info()[0])

    def _reserve(self, more: int) -> None:
        """Reserve memory, and at least two slots per place."""
        record = self._record
        needed = record.size + more
        if needed > len(self._tokens):
            capacity = max(needed, 2 * len(self._tokens), FIRST_PLACES)
            self._tokens, self._before = np.resize(self._tokens, capacity), np.empty(capacity, np.int32)
            self._slots = np.zeros(1 << (2 * capacity - 1).bit_length(), np.int32)
            record.tokens, record.before = self._tokens.ctypes.data, self._before.ctypes.data
            record.slots, record.bits = self._slots.ctypes.data, (2 * capacity - 1).bit_length()
            self._core.index_places(self.address)
