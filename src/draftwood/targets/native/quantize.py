"""Matrices in 8 bits: a number of 8 bits for every weight, and a scale for every output feature.

A pass over a few positions takes as long as its weights take to arrive, so half the bytes are nearly half the time. A
model in 8 bits is another model than the one it was made from, and a target like any other: plain and speculative
decoding read the same weights.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

ROWS_AT_ONCE = 4096  # of a matrix that is expanded to float32 on its way


class Quantized(NamedTuple):
    """A matrix: ``values * scales[:, None]``."""

    values: torch.Tensor  # [out, in] 8 bits
    scales: torch.Tensor  # [out] float32


Matrix = torch.Tensor | Quantized  # [out, in]


class Format(NamedTuple):
    dtype: torch.dtype
    largest: float  # what the largest weight of a row becomes


FORMATS = {"fp8": Format(torch.float8_e4m3fn, 448.0), "int8": Format(torch.int8, 127.0)}


def quantize_matrix(weight: torch.Tensor, name: str) -> Quantized:
    """``weight [out, in]`` in the format of this name, each weight rounded to the nearest."""
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
    """The matrix as a tensor: itself, or what its 8 bits stand for, rounded to ``dtype``."""
    if isinstance(matrix, torch.Tensor):
        return matrix
    return (matrix.values.float() * matrix.scales[:, None]).to(dtype)


def storage_of(matrix: Matrix) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What lies in memory: the weights, and their scales where they have some."""
    return (matrix, None) if isinstance(matrix, torch.Tensor) else matrix


def format_of(matrix: Matrix) -> str | None:
    """The name of its format; None if it is in no format of 8 bits."""
    dtype = storage_of(matrix)[0].dtype
    return next((name for name, kind in FORMATS.items() if kind.dtype == dtype), None)


def row_blocks(matrix: Matrix, num_rows: int) -> list[Matrix]:
    """The matrix cut into blocks of that many rows, if it is in 8 bits: nobody has to expand it whole."""
    if isinstance(matrix, torch.Tensor):
        return [matrix]
    rows = (slice(first, first + num_rows) for first in range(0, len(matrix.values), num_rows))
    return [Quantized(matrix.values[block], matrix.scales[block]) for block in rows]
