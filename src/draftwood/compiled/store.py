"""A datastore for the functions of store.h."""

import ctypes
from ctypes import c_int64, c_void_p

import numpy as np
import numpy.typing as npt


class _StoreRecord(ctypes.Structure):
    _fields_ = (("size", c_int64), ("vocab", c_int64), ("tokens", c_void_p), ("suffixes", c_void_p))


class CompiledStore:
    def __init__(self, tokens: npt.NDArray[np.int32], suffixes: npt.NDArray[np.int32], vocab_size: int) -> None:
        """The arrays may be mapped files; they are only read."""
        self._memory = np.ascontiguousarray(tokens), np.ascontiguousarray(suffixes)
        addresses = [part.ctypes.data for part in self._memory]
        self._record = _StoreRecord(len(tokens), vocab_size, *addresses)
        self.address = ctypes.addressof(self._record)
