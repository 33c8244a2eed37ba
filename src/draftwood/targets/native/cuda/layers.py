"""The target's layers on a GPU, for training: the vendor's products, and one kernel for everything between two.

Training runs tens of thousands of rows. Each small torch operation would then read and write all rows in memory, which
takes longer than the products.
"""

# ruff: noqa: N803 - compile-time values are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl

from draftwood.targets.native.cuda.common import rms_norm
from draftwood.targets.native.cuda.device import on_device
from draftwood.targets.native.cuda.kernels import rows
from draftwood.targets.native.eager import EagerLayers, Turns
from draftwood.targets.native.weights import LayerWeights

NUMBERS_PER_WARP = 512  # of a normed row
MAX_WARPS = 16
PAIRS_PER_PROGRAM = 1024  # pairs of dimensions that a program rotates
ROTATE_WARPS = 4


@triton.jit
def _add_and_norm(hidden, change, weight, sums, out, eps, H: tl.constexpr, BLOCK: tl.constexpr):
    """One row: ``sums = hidden + change``, and ``out`` is its RMS norm."""
    row = tl.program_id(0).to(tl.int64) * H
    at = tl.arange(0, BLOCK)
    inside = at < H
    before = tl.load(hidden + row + at, mask=inside, other=0.0)
    added = tl.load(change + row + at, mask=inside, other=0.0)
    total = (before.to(tl.float32) + added.to(tl.float32)).to(before.dtype)
    tl.store(sums + row + at, total, mask=inside)
    tl.store(out + row + at, rms_norm(total, weight, at, inside, eps, H), mask=inside)


@triton.jit
def _apply_norm(x, scale, is_query, q_norm, k_norm, at, inside, TYPE: tl.constexpr):
    """Multiply heads [n, block] by their scales [n] and the weights of their norm, rounded as in the reference."""
    of_query = tl.load(q_norm + at, mask=inside, other=0.0).to(tl.float32)
    of_key = tl.load(k_norm + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.where(is_query[:, None], of_query[None, :], of_key[None, :])
    return ((x * scale[:, None]).to(TYPE).to(tl.float32) * weight).to(TYPE).to(tl.float32)


@triton.jit(do_not_specialize=["num_heads"])
def _rotate(
    qkv, keys, cos, sin, q_norm, k_norm, num_heads, eps,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    TILE: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    """TILE heads, counted row by row. Queries are rotated in place, rotated keys go to ``keys``."""
    which = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row, head = (which // (HEADS + KV)).to(tl.int64), which % (HEADS + KV)
    is_query = head < HEADS
    at = tl.arange(0, BLOCK)
    in_half = at < HALF
    inside = (which < num_heads)[:, None] & in_half[None, :]
    source = qkv + row * ((HEADS + 2 * KV) * D) + head * D
    target = tl.where(is_query, source, keys + row * (KV * D) + (head - HEADS) * D)
    read, write = source[:, None] + at[None, :], target[:, None] + at[None, :]
    angle = (row * D)[:, None] + at[None, :]
    kind = qkv.dtype.element_ty
    first = tl.load(read, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(read + HALF, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / D + eps)
        first = _apply_norm(first, scale, is_query, q_norm, k_norm, at, in_half, kind)
        second = _apply_norm(second, scale, is_query, q_norm + HALF, k_norm + HALF, at, in_half, kind)
    tl.store(write, (first * c - second * s).to(kind), mask=inside)
    tl.store(write + HALF, (second * c + first * s).to(kind), mask=inside)


class FusedLayers(EagerLayers):
    """Half precision. Rounds where the eager layers do, except for values that never leave a kernel."""

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = _rows(hidden)
        out = torch.empty_like(x)
        with on_device(self.device):
            rows.norm_rows(x, weight, out, self.config.norm_eps, pdl=False)
        return out.view(hidden.shape)

    def _add(
        self, hidden: torch.Tensor, change: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before, added = _rows(hidden), _rows(change)
        sums, out = torch.empty_like(before), torch.empty_like(before)
        num_rows, width = before.shape
        block = triton.next_power_of_2(width)
        with on_device(self.device):
            _add_and_norm[(num_rows,)](
                before, added, weight, sums, out, self.config.norm_eps,
                H=width, BLOCK=block, num_warps=norm_warps(block),
            )  # fmt: skip
        return sums.view(hidden.shape), out.view(hidden.shape)

    def _turn(
        self, layer: LayerWeights, qkv: torch.Tensor, rotation: Turns
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys get their own memory, so that keeping them does not keep the queries alive."""
        query, key, value = self._split(qkv)
        keys = torch.empty_like(key, memory_format=torch.contiguous_format)
        cos, sin = (_rows(each.expand(*query.shape[:-2], 1, -1)) for each in rotation)  # [rows, D]
        heads, kv_heads, dim = query.shape[-2], key.shape[-2], key.shape[-1]
        num_heads = len(cos) * (heads + kv_heads)
        block = triton.next_power_of_2(dim // 2)
        tile = PAIRS_PER_PROGRAM // block
        with on_device(self.device):
            _rotate[(triton.cdiv(num_heads, tile),)](
                qkv, keys, cos, sin, layer.q_norm, layer.k_norm, num_heads, self.config.norm_eps,
                HEADS=heads, KV=kv_heads, D=dim, HALF=dim // 2, BLOCK=block, TILE=tile,
                QK_NORM=layer.q_norm is not None, num_warps=ROTATE_WARPS,
            )  # fmt: skip
        return query, keys, value

    def _gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        both = _rows(gate_up)
        out = both.new_empty(len(both), both.shape[1] // 2)
        with on_device(self.device):
            rows.gate_rows(both, out, pdl=False)
        return out.view(*gate_up.shape[:-1], out.shape[1])


def norm_warps(block: int) -> int:
    return min(MAX_WARPS, max(1, block // NUMBERS_PER_WARP))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``[..., n]`` as contiguous ``[rows, n]``."""
    return x.flatten(0, -2).contiguous()
