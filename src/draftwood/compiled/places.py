"""The index of a text in C: owns its memory and calls the functions of places.h."""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import numpy as np

from draftwood.compiled.core import Core

FIRST_PLACES = 1024
NUM_ORDERS = 3  # as in places.h


class _PlacesRecord(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("size", "capacity")),
        *((name, c_void_p) for name in ("tokens", "before")),
        ("bits", c_int64),
        ("slots", c_void_p),
    )


class CompiledPlaces:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._record = _PlacesRecord()
        self.address = ctypes.addressof(self._record)
        self._tokens = np.empty(0, np.int32)

    def __len__(self) -> int:
        return int(self._record.size)

    def extend(self, tokens: Sequence[int]) -> None:
        self.reserve(len(tokens))
        new = array("i", tokens)
        self._core.add_places(self.address, len(new), new.buffer_info()[0])

    def last(self, count: int) -> list[int]:
        return self._tokens[len(self) - count : len(self)].tolist()  # type: ignore[no-any-return]

    def forget(self, count: int) -> None:
        """Drop the first ``count`` tokens."""
        if not count:
            return
        kept = self._tokens[count : len(self)].copy()
        self._tokens[: len(kept)] = kept
        self._slots[:] = 0
        self._record.size = len(kept)
        self._core.index_places(self.address)

    def reserve(self, more: int) -> None:
        """Reserve memory for more tokens, and at least two slots per place."""
        record = self._record
        needed = record.size + more
        if needed > len(self._tokens):
            capacity = max(needed, 2 * len(self._tokens), FIRST_PLACES)
            bits = (2 * capacity - 1).bit_length()
            self._tokens = np.resize(self._tokens, capacity)
            self._before, self._slots = (
                np.empty((NUM_ORDERS, capacity), np.int32),
                np.zeros((NUM_ORDERS, 1 << bits), np.int32),
            )
            record.tokens, record.before = self._tokens.ctypes.data, self._before.ctypes.data
            record.slots, record.bits, record.capacity = self._slots.ctypes.data, bits, capacity
            self._core.index_places(self.address)
