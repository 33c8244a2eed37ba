"""Buffers that passes share, since only one runs at a time.

A captured graph keeps the addresses it was captured with. Buffers therefore never move or shrink: a pass that needs
more gets a larger buffer, and earlier passes keep theirs. So a pass asks once, before its first launch, and keeps a
reference: without one the allocator would reuse the memory that the graph still writes to.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from draftwood.models import ModelConfig
from draftwood.targets.native.cuda.products import Hidden

ROW_CLASSES = (16, 128, 512)  # rows of buffers; beyond the last, powers of two


class Buffers(NamedTuple):
    """Intermediate results of a layer, for N rows."""

    hidden: Hidden
    normed: torch.Tensor  # [N, H] wide passes only
    qkv: torch.Tensor  # [N, (heads + 2 * kv_heads) * D]
    mixed: torch.Tensor  # [N, heads * D]
    gate_up: torch.Tensor  # [N, 2 * inner] wide passes only
    inner: torch.Tensor  # [N, inner]

    def first(self, rows: int) -> Buffers:
        hidden = Hidden(self.hidden.states[:rows], self.hidden.scaled[:rows], self.hidden.squares)
        return Buffers(hidden, *(buffer[:rows] for buffer in self[1:]))


class Workspace:
    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._buffers: dict[int, Buffers] = {}
        self._logits: dict[tuple[int, int], torch.Tensor] = {}
        self._matrix = torch.zeros(0, dtype=dtype, device=device)
        self._paths = torch.zeros(0, dtype=torch.int16, device=device)
        self._floats = torch.zeros(0, device=device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)

    def buffers(self, rows: int) -> Buffers:
        size = _round_up(rows)
        if size not in self._buffers:
            self._buffers[size] = self._new_buffers(size)
        return self._buffers[size].first(rows)

    def logits(self, rows: int, lane: int) -> torch.Tensor:
        """[rows, V] float32. One buffer per lane: they may be read while the other lane's pass runs."""
        key = (_round_up(rows) if rows else 0, lane)
        if key not in self._logits:
            self._logits[key] = torch.zeros(key[0], self._config.vocab_size, device=self._device)
        return self._logits[key][:rows]

    def matrix(self) -> torch.Tensor:
        """A flat buffer for the largest weight matrix of a layer."""
        config = self._config
        width, inner, q = config.hidden_size, config.intermediate_size, config.q_size
        size = max(width * (q + 2 * config.kv_size), width * q, 2 * width * inner)
        if len(self._matrix) < size:
            self._matrix = torch.zeros(size, dtype=self._dtype, device=self._device)
        return self._matrix

    def paths(self, rows: int, length: int) -> torch.Tensor:
        """[rows, length] the nodes above each row in its tree."""
        if self._paths.numel() < rows * length:
            self._paths = torch.zeros(rows * length, dtype=torch.int16, device=self._device)
        return self._paths[: rows * length].view(rows, length)

    def scratch(self, floats: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for partial results, and counters that are zero and that kernels reset to zero."""
        if len(self._floats) < floats:
            self._floats = torch.zeros(floats, device=self._device)
        if len(self._counters) < counters:
            self._counters = torch.zeros(counters, dtype=torch.int32, device=self._device)
        return self._floats, self._counters

    def _new_buffers(self, rows: int) -> Buffers:
        config = self._config
        width, inner, qkv = config.hidden_size, config.intermediate_size, config.q_size + 2 * config.kv_size

        def empty(columns: int) -> torch.Tensor:
            # Zeros: padding rows are computed like others, and should not be NaN.
            return torch.zeros(rows, columns, dtype=self._dtype, device=self._device)

        squares = torch.zeros(-(-width // 16), max(rows, 16), device=self._device)
        return Buffers(
            Hidden(empty(width), empty(width), squares),
            empty(width), empty(qkv), empty(config.q_size), empty(2 * inner), empty(inner),
        )  # fmt: skip


def _round_up(rows: int) -> int:
    return next((size for size in ROW_CLASSES if rows <= size), 1 << (rows - 1).bit_length())
