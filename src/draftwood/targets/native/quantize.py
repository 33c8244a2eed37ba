"""Quantised matrices: in the blocks of a GGUF file, or in 8 bits with a scale per output feature.

A pass over a few positions is bound by memory bandwidth, so half the bytes take nearly half the time. A quantised model
is a different model from the original: plain and speculative decoding use the same quantised weights.
"""

from typing import NamedTuple

import torch

from draftwood.models import StoredTensor

ROWS_AT_ONCE = 4096  # rows expanded to float32 at a time


class Quantized(NamedTuple):
    """A matrix: ``values * scales[:, None]``."""

    values: torch.Tensor  # [out, in] 8 bits
    scales: torch.Tensor  # [out] float32


class Stored(NamedTuple):
    """A matrix in the blocks of a GGUF file, or several below each other, whose formats may differ."""

    parts: tuple[StoredTensor, ...]

    @property
    def num_rows(self) -> int:
        return sum(part.shape[0] for part in self.parts)

    @property
    def num_columns(self) -> int:
        return self.parts[0].shape[1]


Matrix = torch.Tensor | Quantized | Stored  # [out, in]


class Format(NamedTuple):
    dtype: torch.dtype
    largest: float  # value of the largest weight of a row


FORMATS = {"fp8": Format(torch.float8_e4m3fn, 448.0), "int8": Format(torch.int8, 127.0)}


def quantize_matrix(weight: torch.Tensor, name: str) -> Quantized:
    """Quantises ``weight [out, in]`` to the named format, rounding to nearest."""
    dtype, largest = FORMATS[name]
    values = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    for first in range(0, len(weight), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        wide = weight[rows].float()
        scale = wide.abs().amax(dim=1) / largest
        scale[scale == 0.0] = 1.0  # a row of zeros
        scaled = (wide / scale[:, None]).clamp_(-largest, largest)
        values[rows] = (scaled.round_() if dtype == torch.int8 else scaled).to(dtype)
        scales[rows] = scale
    return Quantized(values, scales)


def to_dense(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """Returns the matrix as a tensor; a quantised matrix is expanded and rounded to ``dtype``."""
    if isinstance(matrix, torch.Tensor):
        return matrix
    if isinstance(matrix, Stored):
        return torch.cat([torch.from_numpy(part.floats()) for part in matrix.parts]).to(dtype)
    return (matrix.values.float() * matrix.scales[:, None]).to(dtype)


def storage_of(matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the stored weights, and their scales or None; not for matrices that are still in a file."""
    assert not isinstance(matrix, Stored)
    return (matrix, None) if isinstance(matrix, torch.Tensor) else matrix


def num_weights(matrix: Matrix) -> int:
    return matrix.num_rows * matrix.num_columns if isinstance(matrix, Stored) else storage_of(matrix)[0].numel()


def format_of(matrix: Matrix) -> str | None:
    """Returns the name of its 8-bit or block format, or None."""
    if isinstance(matrix, Stored):
        return matrix.parts[0].format
    dtype = storage_of(matrix)[0].dtype
    return next((name for name, kind in FORMATS.items() if kind.dtype == dtype), None)


def row_blocks(matrix: Matrix, num_rows: int) -> list[Matrix]:
    """Splits an 8-bit matrix into blocks of ``num_rows`` rows, so that it need not be expanded as a whole."""
    if isinstance(matrix, torch.Tensor):
        return [matrix]
    assert isinstance(matrix, Quantized)
    rows = (slice(first, first + num_rows) for first in range(0, len(matrix.values), num_rows))
    return [Quantized(matrix.values[block], matrix.scales[block]) for block in rows]
