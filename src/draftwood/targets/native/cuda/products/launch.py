"""Products of rows with a large weight matrix, with everything else fused in.

A pass over a tree multiplies 1 to 64 rows with every weight of the model, which takes as long as loading the weights. A
program computes a block of output features for a tile of rows and streams that block's weights along the input. The
operations around a product in a decoder layer are fused into it:

- *norm*: the previous product wrote its result ``h`` in three forms: ``h`` itself, ``h`` times the weight of the next
  norm, and the sums of squares over groups of features. A normed product scales its rows once, at the end.
- *gated*: gate and up are computed side by side, and only ``silu(gate) * up`` is written.
- *residual*: the result is added to the hidden states in place.
- *scales*: 8-bit weights are widened in registers, and each feature's sum is scaled at the end.
- *cache write*: a block of heads holds both dimensions of every pair that the rotation mixes. Rotated queries go to the
  output; rotated keys, and values, go straight to the KV cache.
- *peaks*: each block of logits writes its maximum and its sum of exponentials, from which the top entries are found.

Where a matrix has too few blocks to keep the GPU busy, its input is cut into parts. With few rows several programs
share a block, each with one part, and the last one to finish adds the partial sums in the order of the parts. With
many rows one program computes all parts in turn. If a product is exact, the parts are the same for all numbers of rows,
and so are the bits of each row.

With programmatic dependent launch a kernel starts before the previous one has finished. It prefetches its first weights
into the L2 cache, and then waits for its input.
"""

from enum import Enum
from typing import Any, NamedTuple, Self

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from draftwood.targets.native.cuda.common import launch_options
from draftwood.targets.native.cuda.products.kernel import product_kernel
from draftwood.targets.native.quantize import Matrix, storage_of

MAX_ROWS = 64  # above, the vendor's library is faster; exact products tile more rows
MAX_SHARED = 512  # features of a block times programs that share it: the last one adds all their sums
AHEAD = 256  # bytes of each weight row that are prefetched before the input is ready
HALF_SCALE = 2.0**-6  # hidden states before their norm can overflow float16; a power of two loses no precision
NARROW_BLOCK = 32  # output features of a block of a small matrix
SPARE_BYTES = 4096  # shared memory left for sums across warps
SMALL = 2 << 20  # bytes of a matrix that load faster than the programs that would share it start
MEDIUM = 8 << 20  # bytes of a matrix that load so fast that room for the next kernel's programs matters more
NORMED_DIMS = (16, 32, 64, 128)  # head sizes that fit a block
IN_FLIGHT = 72 << 10  # bytes that a program with 8-bit weights loads ahead
FEW_PROGRAMS = 1.5  # per processor: fewer are made smaller, if their weights have 8 bits
HEAD_BLOCK = 128  # logits of a block whose peak is written: the block size of the top kernels


class Kind(Enum):
    PLAIN = "plain"
    GATED = "gated"
    HEAD = "head"


class Tiling(NamedTuple):
    """How a product is divided into programs and steps."""

    block_out: int
    block_in: int
    splits: int  # parts of the input
    num_warps: int
    num_stages: int
    block_rows: int = 0  # 0: one tile has all rows, padded to a power of two
    is_serial: bool = False  # whether a program computes all parts


class Gpu(NamedTuple):
    """Properties of a GPU that tilings depend on."""

    num_processors: int
    shared_bytes: int  # shared memory that one program may use


class Hidden(NamedTuple):
    """Hidden states in the three forms that the next product reads."""

    states: torch.Tensor  # [rows, H]
    scaled: torch.Tensor  # [rows, H] states times the weight of the next norm
    squares: torch.Tensor  # [groups, >= rows] float32: sums of squares over groups of features


class Heads(NamedTuple):
    """The heads that the output features of a QKV projection belong to."""

    num_heads: int
    num_kv_heads: int
    dim: int
    are_normed: bool

    @property
    def can_rotate(self) -> bool:
        """Whether a product can rotate them: normed heads must fit a block, and blocks have few sizes."""
        return not self.are_normed or self.dim in NORMED_DIMS


class Rotation(NamedTuple):
    """Rotary embedding of queries and keys, and the norms before it."""

    cos: torch.Tensor  # [positions, D / 2]
    sin: torch.Tensor  # [positions, D / 2]
    q_norm: torch.Tensor | None = None  # [D] norm weights of queries and keys, if the model has them
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


class CacheWrite(NamedTuple):
    """How to rotate queries and keys, and where to write keys and values."""

    rotation: Rotation
    positions: torch.Tensor  # [rows] int32
    slots: torch.Tensor  # [rows] int32; negative: a padding row, which is not written
    keys: torch.Tensor  # [kv_heads, slots, D]
    values: torch.Tensor  # [kv_heads, slots, D]


def choose_tiling(
    num_in: int,
    num_out: int,
    rows: int,
    gpu: Gpu,
    kind: Kind,
    weight_bytes: int = 2,
    head_dim: int = 0,
    *,
    turns: bool = False,
    exact: bool = False,
) -> Tiling:
    """Choose a tiling, by rules found by timing whole passes of three models on an H200: all processors are busy, and
    each has many bytes in flight.

    ``weight_bytes`` is the size of one weight. ``head_dim`` is set where a block must be exactly one head. ``turns``:
    heads are rotated, which takes registers. If ``exact``, the parts that the input is cut into do not depend on the
    rows, because they determine the order of sums.
    """
    if exact and rows > MAX_ROWS:
        splits = choose_tiling(num_in, num_out, 1, gpu, kind, weight_bytes, head_dim, exact=True).splits
        return _choose_wide(num_in, num_out, rows, gpu, kind, weight_bytes, head_dim, splits)
    padded = max(16, triton.next_power_of_2(rows))
    if weight_bytes == 1:
        return _choose_widening(num_in, num_out, padded, gpu, kind, head_dim, turns=turns, exact=exact)
    wide = padded > 16  # then loading the rows from the L2 cache takes time too
    size = num_in * num_out * weight_bytes
    is_small = size <= SMALL
    is_medium = wide and kind is Kind.PLAIN and SMALL < size <= MEDIUM
    short = kind is Kind.GATED or (kind is Kind.HEAD and wide) or is_medium
    block_in = _choose_step(num_in, 64 if short else 128)
    steps = num_in // block_in
    if kind is Kind.HEAD:
        block_out = HEAD_BLOCK
    elif head_dim:
        block_out = head_dim
    elif is_small:
        block_out = 16 if wide and not exact else NARROW_BLOCK
    else:
        block_out = 64 if num_out >= 2048 or kind is Kind.PLAIN else NARROW_BLOCK
    blocks = triton.cdiv(num_out, block_out)
    splits = 1
    if exact and wide:
        splits = choose_tiling(num_in, num_out, 1, gpu, kind, weight_bytes, head_dim, exact=True).splits
        block_in = _choose_step(num_in // splits, block_in)
    elif kind is not Kind.HEAD and blocks < gpu.num_processors:
        min_steps = (6 if is_small else 8 if is_medium else 4) if wide else 3  # of a program
        max_programs = gpu.num_processors * (2 if is_small else 1)
        max_splits = min(steps // min_steps, MAX_SHARED // block_out)
        splits = max((n for n in range(1, max_splits + 1) if steps % n == 0 and blocks * n <= max_programs), default=1)
    stage = block_in * (block_out * weight_bytes * (2 if kind is Kind.GATED else 1) + padded * 2)  # bytes
    alone = not is_medium and (blocks * splits <= gpu.num_processors or kind is Kind.HEAD)
    room = gpu.shared_bytes if alone else gpu.shared_bytes // 2
    most_stages = {Kind.PLAIN: 7 if wide and size <= MEDIUM else 6, Kind.GATED: 5, Kind.HEAD: 4}[kind]
    num_stages = max(2, min(most_stages, room // stage))
    num_warps = 8 if wide and head_dim > 64 else 4  # halves the registers per thread of blocks that large
    return Tiling(block_out, block_in, splits, num_warps, num_stages)


def _choose_widening(
    num_in: int, num_out: int, padded: int, gpu: Gpu, kind: Kind, head_dim: int, *, turns: bool, exact: bool
) -> Tiling:
    """A tiling for 8-bit weights. Widening them takes about as long as loading them, so several small programs share a
    processor: one loads while another widens."""
    wide = padded > 16
    block_out = HEAD_BLOCK if kind is Kind.HEAD else head_dim or 64
    if kind is not Kind.HEAD and not (exact or head_dim):  # exact: narrower blocks widen weights in another order
        parts = 4 if kind is Kind.PLAIN else 1
        is_short = triton.cdiv(num_out, block_out) * parts < FEW_PROGRAMS * gpu.num_processors
        block_out = NARROW_BLOCK if is_short or not wide else block_out
    blocks = triton.cdiv(num_out, block_out)
    is_whole = kind is Kind.HEAD or (kind is Kind.GATED and blocks >= gpu.num_processors)
    most = 1 if is_whole else block_out // 16
    splits = next(n for n in (4, 2, 1) if n <= most and (num_in % (64 * n) == 0 or n == 1))
    is_large = kind is Kind.PLAIN and not wide and block_out == NARROW_BLOCK and num_in >= 4096
    block_in = _choose_step(num_in // splits, 256 if is_large else 128)
    stage = block_in * (block_out * (2 if kind is Kind.GATED else 1) + padded * 2)  # bytes
    most_stages = 3 if kind is Kind.GATED else max(3, min(6, IN_FLIGHT // stage))
    num_stages = max(2, min(most_stages, (gpu.shared_bytes - SPARE_BYTES) // stage))
    is_dense = wide and (head_dim > 64 or (turns and not exact and padded > 32 and block_out > NARROW_BLOCK))
    return Tiling(block_out, block_in, splits, 8 if is_dense else 4, num_stages)  # 8: fewer registers per thread


def _choose_wide(
    num_in: int, num_out: int, rows: int, gpu: Gpu, kind: Kind, weight_bytes: int, head_dim: int, splits: int
) -> Tiling:
    """A tiling for many rows, bound by arithmetic: large tiles, several of which use weights that are loaded once."""
    if kind is Kind.HEAD:
        block_rows, block_out, num_warps = 128, HEAD_BLOCK, 4
    elif kind is Kind.GATED:
        block_rows, block_out, num_warps = (128, 128, 8) if rows <= 128 else (256, 64, 8)
        if splits > 1:  # sums of several parts take registers
            block_rows, block_out, num_warps = 64, 64, 4
    else:
        block_rows, block_out, num_warps = 128, 64, 4
    if head_dim:
        block_rows, block_out, num_warps = (128, head_dim, 4) if head_dim <= 64 else (128, head_dim, 8)
    programs = triton.cdiv(num_out, block_out) * triton.cdiv(rows, block_rows)
    block_in = _choose_step(num_in // splits, 64)
    stage = block_in * (block_out * weight_bytes * (2 if kind is Kind.GATED else 1) + block_rows * 2)
    num_stages = max(2, min(4, (gpu.shared_bytes - SPARE_BYTES) // stage))
    is_serial = splits > 1 and programs >= gpu.num_processors
    return Tiling(block_out, block_in, splits, num_warps, num_stages, block_rows, is_serial)


def _choose_step(num_in: int, largest: int) -> int:
    """Inputs per step: the largest power of two from ``largest`` down that divides their number."""
    return next(step for step in (256, 128, 64, 32, 16) if step <= largest and num_in % step == 0)


class Product:
    """One product of a decoder layer for a fixed number of rows. Computes once what is the same in every layer."""

    def __init__(
        self,
        num_in: int,
        num_out: int,
        rows: int,
        gpu: Gpu,
        kind: Kind = Kind.PLAIN,
        *,
        dtype: torch.dtype,
        weight_bytes: int = 2,
        eps: float = 0.0,
        heads: Heads | None = None,
        pdl: bool = False,
        exact: bool = False,
    ) -> None:
        """``num_out`` counts the features of the result: half the weight's rows if gated. ``dtype`` is that of the
        rows. ``heads`` is set for a QKV projection that rotates and writes to the cache. If ``exact``, a row has the
        same bits whatever the number of rows, and their number is not limited to MAX_ROWS."""
        self._options: dict[str, Any] = {
            "dtype": dtype, "weight_bytes": weight_bytes, "eps": eps, "heads": heads, "pdl": pdl, "exact": exact
        }  # fmt: skip
        self._sizes = num_in, num_out, gpu, kind
        head_dim = heads.dim if heads is not None and heads.are_normed else 0
        self.tiling = choose_tiling(
            num_in, num_out, rows, gpu, kind, weight_bytes, head_dim, turns=heads is not None, exact=exact
        )
        self.num_blocks = triton.cdiv(num_out, self.tiling.block_out)
        self._block_rows = self.tiling.block_rows or max(16, triton.next_power_of_2(rows))
        self.num_tiles = triton.cdiv(rows, self._block_rows)
        group = NARROW_BLOCK if num_in * num_out * weight_bytes <= SMALL else 64
        if not exact:
            group = min(group, self.tiling.block_out)
        self.num_groups = triton.cdiv(num_out, group)  # of features, whose sums of squares are written
        # The copy engine reads rectangles: not the features of rotated heads, which are permuted.
        self._copies_tensors = pdl and rows > MAX_ROWS and heads is None
        self._kind = kind
        self._eps = eps
        self._rows = rows
        self._constants = {
            "IN": num_in,
            "OUT": num_out,
            "BM": self._block_rows,
            "BO": self.tiling.block_out,
            "BI": self.tiling.block_in,
            "SPLITS": self.tiling.splits,
            "SERIAL": self.tiling.is_serial,
            "GROUP": group,
            "SCALE": HALF_SCALE if dtype == torch.float16 else 1.0,
            "ROW_SCALE": 1.0 if dtype == torch.float16 else HALF_SCALE,
            "GATED": kind is Kind.GATED,
            "D": heads.dim if heads else 0,
            "HEADS": heads.num_heads if heads else 0,
            "KV": heads.num_kv_heads if heads else 0,
            "QK_NORM": head_dim > 0,
            "AHEAD": 0 if rows > MAX_ROWS else min(AHEAD, num_in // self.tiling.splits * weight_bytes),
            "TENSOR_COPY": self._copies_tensors,
            "PDL": pdl,
            "num_warps": self.tiling.num_warps,
            "num_stages": self.tiling.num_stages,
            **launch_options(pdl),
        }

    def with_rows(self, rows: int) -> Self:
        """The same product of another number of rows."""
        num_in, num_out, gpu, kind = self._sizes
        return type(self)(num_in, num_out, rows, gpu, kind, **self._options)

    @property
    def scratch(self) -> tuple[int, int]:
        """Float32 values and int32 counters that a launch needs. The counters must be zero before the first launch."""
        tiling = self.tiling
        if tiling.splits == 1 or tiling.is_serial:
            return 0, 0
        size = tiling.block_out * self._block_rows * (2 if self._kind is Kind.GATED else 1)
        blocks = self.num_blocks * self.num_tiles
        return blocks * tiling.splits * size, blocks

    def launch(
        self,
        x: torch.Tensor,
        weight: Matrix,
        out: torch.Tensor,
        *,
        squares: torch.Tensor | None = None,
        num_squares: int = 0,
        bias: torch.Tensor | None = None,
        hidden: Hidden | None = None,
        next_norm: torch.Tensor | None = None,
        peaks: torch.Tensor | None = None,
        cache_write: CacheWrite | None = None,
        parts: torch.Tensor | None = None,
        counters: torch.Tensor | None = None,
    ) -> None:
        """Write ``x [rows, in]`` times ``weight [out, in]`` to ``out [rows, out]``. Allocates nothing, does not wait.

        With ``squares [num_squares, >= rows]``, x is ``Hidden.scaled`` of hidden states to be normed. With
        ``hidden``, the result is added to ``hidden.states``, which must be ``out``, and prepared for ``next_norm``.
        With ``peaks``, each block writes its peak and sum, see ``block_peaks`` in common.py. ``cache_write`` is
        required with ``heads``; ``out`` then gets the queries only.
        """
        assert (cache_write is not None) == (self._constants["D"] > 0), "cache_write goes with heads"
        values, scales = storage_of(weight)
        _, scaled, next_squares = hidden or (None, None, None)
        written = next_squares if squares is None else squares
        wide_scale = self._constants["ROW_SCALE"] if values.dtype == torch.float8_e4m3fn else 1.0
        if cache_write is not None:
            assert cache_write.keys.is_contiguous()
            assert cache_write.values.is_contiguous()
            assert (cache_write.rotation.q_norm is not None) == self._constants["QK_NORM"]
        _, positions, slots, keys, cached_values = cache_write or (None,) * 5
        cos, sin, q_norm, k_norm, head_eps = cache_write.rotation if cache_write else (None, None, None, None, 0.0)
        if self._copies_tensors:
            tiling = self.tiling
            x = _describe(x, self._block_rows, tiling.block_in)
            values = _describe(values, tiling.block_out, tiling.block_in)
        product_kernel[(self.num_tiles, self.num_blocks, 1 if self.tiling.is_serial else self.tiling.splits)](
            x, values, scales, out, squares, bias, scaled, next_norm, next_squares,
            0 if written is None else written.stride(0), peaks, parts, counters,
            cos, sin, positions, slots, keys, cached_values, q_norm, k_norm, 0 if keys is None else keys.stride(0),
            self._eps, head_eps, self._rows,
            COUNT=num_squares, PAD=triton.next_power_of_2(max(num_squares, 1)), WEIGHT_SCALE=wide_scale,
            QUANTIZED=scales is not None, NORMED=squares is not None, BIAS=bias is not None,
            RESIDUAL=hidden is not None, PEAKS=peaks is not None,
            **self._constants,
        )  # fmt: skip


def _describe(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])
