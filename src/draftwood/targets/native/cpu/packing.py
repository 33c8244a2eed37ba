"""Packs the matrices of a model into one piece of memory, in the layouts of the kernel."""

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from draftwood.errors import ModelError
from draftwood.targets.native.cpu.records import DTYPES, FORMATS, Matrix
from draftwood.targets.native.quantize import Matrix as Weight
from draftwood.targets.native.quantize import Stored, storage_of, to_dense
from draftwood.targets.native.weights import LayerWeights, Weights

ALIGNMENT = 64
OVERREAD = 4096  # bytes read past the end: products load and prefetch ahead
PART_STEP = 16  # outputs of a part, unless it is the last, are a multiple of this: rows are written in such steps


class Rows(NamedTuple):
    """Rows of a matrix in one format."""

    format: str
    outputs: int
    inputs: int
    read: Callable[[], np.ndarray | torch.Tensor]  # the rows as the format has them, in one piece


class Packer:
    def __init__(self, kernel: ctypes.CDLL, weights: Weights, dtype: torch.dtype) -> None:
        """Allocates memory for all matrices in one piece, so that huge pages fit. Untouched pages cost nothing yet."""
        self._kernel = kernel
        self._dtype = dtype
        size = sum(self._num_bytes(record) for record in self._records(weights))
        self._arena = torch.empty(size + ALIGNMENT + OVERREAD, dtype=torch.uint8)
        self._function("draftwood_advise", None)(self._arena.data_ptr(), self._arena.numel())
        self._next = -(-self._arena.data_ptr() // ALIGNMENT) * ALIGNMENT

    def pack(self, weight: Weight) -> Matrix:
        (rows,) = self._split(weight)
        return self._pack(rows)

    def pack_parts(self, weight: Weight) -> ctypes.Array[Matrix]:
        """Packs a matrix whose parts may differ in format."""
        return (Matrix * 3)(*map(self._pack, self._split(weight)))

    def pack_gate_up(self, weight: Weight) -> ctypes.Array[Matrix]:
        """Packs gates and ups into one matrix, or into two if their formats differ."""
        parts = self._split(weight)
        return (Matrix * 2)(*(self._pack(rows, joined=len(parts) == 1) for rows in parts))

    def describe(self, weight: torch.Tensor) -> Matrix:
        """Describes a matrix that stays as it is."""
        return _record(self._split(weight)[0], weight.data_ptr())

    def release(self) -> None:
        """Gives memory that was freed while weights and tokenizer were read back to the system."""
        self._function("draftwood_release", None)()

    def _records(self, weights: Weights) -> Iterator[Matrix]:
        for layer in weights.layers:
            yield from self._layer_records(layer)
        yield from map(_record, self._split(weights.head))
        if weights.stored_embed is not None and not weights.tied:
            yield from map(_record, self._split(weights.stored_embed))

    def _layer_records(self, layer: LayerWeights) -> Iterator[Matrix]:
        for weight in (layer.qkv, layer.o, layer.down):
            yield from map(_record, self._split(weight))
        parts = self._split(layer.gate_up)
        yield from (_record(rows, joined=len(parts) == 1) for rows in parts)

    def _split(self, weight: Weight) -> list[Rows]:
        """Splits a matrix into parts of one format each."""
        if not isinstance(weight, Stored):
            values, scales = storage_of(weight)
            outputs, inputs = values.shape
            dtype = values.dtype if scales is None else self._dtype  # 8-bit weights are expanded before they are packed
            return [Rows(DTYPES[dtype], outputs, inputs, lambda: to_dense(weight, self._dtype).contiguous())]
        split = []
        for name, group in groupby(weight.parts, lambda part: part.format):
            parts = Stored(tuple(group))
            split.append(Rows(name, parts.num_rows, parts.num_columns, partial(_read_blocks, parts)))
        if any(rows.outputs % PART_STEP for rows in split[:-1]):
            return [Rows("F32", weight.num_rows, weight.num_columns, lambda: to_dense(weight, torch.float32))]
        return split

    def _pack(self, rows: Rows, *, joined: bool = False) -> Matrix:
        matrix = _record(rows, self._next, joined=joined)
        self._next += self._num_bytes(matrix)
        content = rows.read()
        start = content.data_ptr() if isinstance(content, torch.Tensor) else content.ctypes.data
        if self._function("draftwood_pack", ctypes.c_int)(ctypes.byref(matrix), start, torch.get_num_threads()):
            raise ModelError(
                f"A matrix of {rows.outputs} x {rows.inputs} weights in {rows.format} has scales that are not finite",
                next_step="The file is damaged. Fetch it again.",
            )
        return matrix

    def _num_bytes(self, matrix: Matrix) -> int:
        size = self._function("draftwood_packed_bytes", ctypes.c_int64)(ctypes.byref(matrix))
        return -(-int(size) // ALIGNMENT) * ALIGNMENT

    def _function(self, name: str, result: type[ctypes.c_int64] | type[ctypes.c_int] | None) -> Callable[..., int]:
        function = getattr(self._kernel, name)
        function.restype = result
        function.argtypes = _ARGUMENTS[name]
        return function  # type: ignore[no-any-return]


def _record(rows: Rows, data: int | None = None, *, joined: bool = False) -> Matrix:
    """``joined``: the rows are the gates, then as many ups."""
    return Matrix(data, rows.outputs // 2 if joined else rows.outputs, rows.inputs, int(joined), FORMATS[rows.format])


def _read_blocks(weight: Stored) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    parts = [part.read() for part in weight.parts]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "draftwood_advise": (_POINTER, _INT64),
    "draftwood_release": (),
    "draftwood_packed_bytes": (_POINTER,),
    "draftwood_pack": (_POINTER, _POINTER, ctypes.c_int),
}
