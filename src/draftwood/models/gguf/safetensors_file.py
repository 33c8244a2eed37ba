"""Writes a ``model.safetensors`` piece by piece, so that large tensors need not fit in memory.

The format is eight bytes with the length of a JSON header, the header (names, dtypes, shapes, offsets), then the data.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

ITEM_SIZES = {"F32": 4, "F16": 2, "BF16": 2}


class SafetensorsWriter:
    """Reserves space for the header, then writes the tensors in order, and the header last.

    The dtype of a tensor may change to another one of the same size while it is written; its offset stays.
    """

    def __init__(self, path: Path, plan: Mapping[str, tuple[str, Sequence[int]]]) -> None:
        self._dtypes = {name: dtype for name, (dtype, _) in plan.items()}
        self._shapes = {name: list(shape) for name, (_, shape) in plan.items()}
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, (dtype, shape) in plan.items():
            size = ITEM_SIZES[dtype]
            for length in shape:
                size *= length
            self._places[name] = (end, end + size)
            end += size
        self.num_bytes = end
        # Space for the longest dtype names, padded to a multiple of eight bytes as the format requires.
        self._room = -(-len(self._header(dict.fromkeys(plan, "BF16"))) // 8) * 8
        self._file: BinaryIO = path.open("wb")
        self._file.seek(8 + self._room)

    def begin(self, name: str, dtype: str) -> None:
        """Starts a tensor, or starts it again: the next bytes are its data in this dtype."""
        if ITEM_SIZES[dtype] != ITEM_SIZES[self._dtypes[name]]:
            raise ValueError(f"{name} was planned as {self._dtypes[name]}, which differs in size from {dtype}")
        self._dtypes[name] = dtype
        self._file.seek(8 + self._room + self._places[name][0])

    def write(self, piece: bytes) -> None:
        self._file.write(piece)

    def finish(self) -> None:
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._room) + self._header(self._dtypes).ljust(self._room))
        self.close()

    def close(self) -> None:
        self._file.close()

    def _header(self, dtypes: Mapping[str, str]) -> bytes:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name, place in self._places.items():
            entries[name] = {"dtype": dtypes[name], "shape": self._shapes[name], "data_offsets": list(place)}
        return json.dumps(entries, separators=(",", ":")).encode()
