"""Products of a few rows with a large weight matrix: bound by how fast the weights arrive, so all else rides along.

A pass over a tree multiplies 1 to 64 rows with every weight of the model. A program streams a block of output features
over the whole input; the rows are its narrow side. What stands around a product in a decoder layer is folded into it:

- *norm*: the product before wrote its result ``h`` three ways: ``h`` itself, ``h`` times the weight of the next norm,
  and for each of its blocks the sum of squares. So the rows of a normed product are scaled once, at its end.
- *gated*: gate and up are computed side by side, and their SiLU product is all that is written.
- *residual*: the result is added to the hidden states in place.
- *scales*: weights of 8 bits widen in registers, and each feature's sum is scaled in the end.
- *turned*: a block of heads has the pairs of dimensions that a rotation mixes. Queries are written turned; keys, turned
  too, and values go straight into the cache.
- *peaks*: each block of logits leaves its peak and its sum of exponentials, from which the best entries are found.

Where a matrix has too few blocks to keep the GPU busy, several programs share a block along the input, and the last one
to finish adds their parts, always in the same order: the same input gives the same bits.

Kernels start while the one before them ends (programmatic dependent launch): they ask for their first weights to be
brought into the L2 cache, and then wait for their input.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
import triton

from draftwood.targets.native.cuda.products.kernel import product_kernel
from draftwood.targets.native.quantize import Matrix, storage_of

MOST_ROWS = 64  # beyond that the vendor's library is faster
MOST_SHARED = 512  # features of a block times programs that share it: the last one has all their sums at hand
AHEAD = 256  # bytes of each weight row that are asked for before the input is there
HALF_SCALE = 2.0**-6  # float16 has no range for hidden states that are not normed yet; a power of two loses nothing
SMALL = 2 << 20  # bytes of a matrix that are there sooner than the programs that share them
MEDIUM = 8 << 20  # bytes of a matrix that are there so soon that room for the next kernel's programs is worth more
NORMED_DIMS = (16, 32, 64, 128)  # of heads that fit a block
HEAD_BLOCK = 128  # logits of a block, whose peak is noted: what finding the best entries works with


class Kind(Enum):
    PLAIN = "plain"
    GATED = "gated"
    HEAD = "head"


class Tiling(NamedTuple):
    """How a product is cut up."""

    block_out: int
    block_in: int
    splits: int
    num_warps: int
    num_stages: int


class Gpu(NamedTuple):
    """What the cuts depend on."""

    num_processors: int
    shared_bytes: int  # that one program may have


class Hidden(NamedTuple):
    """Hidden states as the next product wants them."""

    states: torch.Tensor  # [rows, H]
    scaled: torch.Tensor  # [rows, H] times the weight of the next norm
    squares: torch.Tensor  # [blocks, padded rows] float32: sums of squares over the features of each block


class Heads(NamedTuple):
    """What the output features of a projection to queries, keys and values are."""

    num_heads: int
    num_kv_heads: int
    dim: int
    are_normed: bool

    @property
    def can_turn(self) -> bool:
        """Whether a product can turn them: those that are normed have to fit a block, of which there are few sizes."""
        return not self.are_normed or self.dim in NORMED_DIMS


class Rotation(NamedTuple):
    """How queries and keys are turned."""

    cos: torch.Tensor  # [positions, D / 2]
    sin: torch.Tensor  # [positions, D / 2]
    q_norm: torch.Tensor | None = None  # [D] weights of the norms of queries and keys, where a model has them
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


class Turned(NamedTuple):
    """How rows of heads are turned, and where their keys and values go."""

    rotation: Rotation
    positions: torch.Tensor  # [rows] int32
    slots: torch.Tensor  # [rows] int32; below 0: a row that only fills up the pass, and leaves nothing
    keys: torch.Tensor  # [kv_heads, slots, D]
    values: torch.Tensor  # [kv_heads, slots, D]


def choose_tiling(
    num_in: int, num_out: int, rows: int, gpu: Gpu, kind: Kind, weight_bytes: int = 2, head_dim: int = 0
) -> Tiling:
    """A good cut, found by timing whole passes of three models on an H200: all processors busy, each with many bytes
    on their way. ``rows``: the padded number; ``weight_bytes``: of one weight; ``head_dim``: where a block has to be
    one head."""
    wide = rows > 16  # the rows' own way from the L2 cache takes time too
    size = num_in * num_out * weight_bytes
    few = size <= SMALL
    soon = wide and kind is Kind.PLAIN and SMALL < size <= MEDIUM
    widens = weight_bytes == 1  # that takes time: two programs share a processor, and one fetches meanwhile
    short = kind is Kind.GATED or (kind is Kind.HEAD and wide) or soon
    block_in = next(step for step in ((64, 32, 16) if short else (128, 64, 32, 16)) if num_in % step == 0)
    steps = num_in // block_in
    if kind is Kind.HEAD:
        block_out = HEAD_BLOCK
    elif head_dim:
        block_out = head_dim
    elif few:
        block_out = 16 if wide else 32
    else:
        block_out = 64 if num_out >= 2048 or kind is Kind.PLAIN else 32
    blocks = triton.cdiv(num_out, block_out)
    splits = 1
    if kind is not Kind.HEAD and blocks < gpu.num_processors:
        least = (6 if few else 8 if soon else 4) if wide else 3  # steps of a program
        most = gpu.num_processors * (2 if few or widens else 1)  # programs
        few_enough = min(steps // least, MOST_SHARED // block_out)
        splits = max((n for n in range(1, few_enough + 1) if steps % n == 0 and blocks * n <= most), default=1)
    stage = block_in * (block_out * weight_bytes * (2 if kind is Kind.GATED else 1) + rows * 2)  # bytes
    alone = not soon and (blocks * splits <= gpu.num_processors or (kind is Kind.HEAD and not widens))
    room = gpu.shared_bytes if alone else gpu.shared_bytes // 2
    bfloat_stages = {Kind.PLAIN: 7 if wide and size <= MEDIUM else 6, Kind.GATED: 5, Kind.HEAD: 4}[kind]
    num_stages = max(2, min(bfloat_stages * 2 // weight_bytes, room // stage))  # the same bytes on their way
    num_warps = 8 if wide and head_dim > 64 else 4  # half the registers a thread for blocks that large
    return Tiling(block_out, block_in, splits, num_warps, num_stages)


class Product:
    """One kind of product of a model, for a fixed number of rows: what is the same in every layer is settled once."""

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
    ) -> None:
        """``num_out``: features of the result, half the weight's rows where they are gated. ``dtype``: the rows'.
        ``heads``: what they are, where they turn."""
        self.padded_rows = max(16, triton.next_power_of_2(rows))
        head_dim = heads.dim if heads is not None and heads.are_normed else 0
        self.tiling = choose_tiling(num_in, num_out, self.padded_rows, gpu, kind, weight_bytes, head_dim)
        self.num_blocks = triton.cdiv(num_out, self.tiling.block_out)
        self._kind = kind
        self._eps = eps
        self._rows = rows
        self._constants = {
            "IN": num_in,
            "OUT": num_out,
            "BM": self.padded_rows,
            "BO": self.tiling.block_out,
            "BI": self.tiling.block_in,
            "SPLITS": self.tiling.splits,
            "SCALE": HALF_SCALE if dtype == torch.float16 else 1.0,
            "ROW_SCALE": 1.0 if dtype == torch.float16 else HALF_SCALE,
            "GATED": kind is Kind.GATED,
            "D": heads.dim if heads else 0,
            "HEADS": heads.num_heads if heads else 0,
            "KV": heads.num_kv_heads if heads else 0,
            "QK_NORM": head_dim > 0,
            "AHEAD": min(AHEAD, num_in // self.tiling.splits * weight_bytes),
            "PDL": pdl,
            "num_warps": self.tiling.num_warps,
            "num_stages": self.tiling.num_stages,
            **({"launch_pdl": True} if pdl else {}),
        }

    @property
    def scratch(self) -> tuple[int, int]:
        """Float32 values and int32 counters that it needs. The counters must be zero before the first launch."""
        tiling = self.tiling
        if tiling.splits == 1:
            return 0, 0
        size = tiling.block_out * self.padded_rows * (2 if self._kind is Kind.GATED else 1)
        return self.num_blocks * tiling.splits * size, self.num_blocks

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
        turned: Turned | None = None,
        parts: torch.Tensor | None = None,
        counters: torch.Tensor | None = None,
    ) -> None:
        """``x [rows, in]`` times ``weight [out, in]`` into ``out [rows, out]``. Nothing is allocated, nothing waits.

        With ``squares [num_squares, padded rows]``, x is ``Hidden.scaled`` of hidden states that are to be normed. With
        ``hidden``, the result is added to ``hidden.states``, which is ``out``, and prepared for ``next_norm``. With
        ``peaks``, see ``block_peaks`` in common.py. ``turned`` goes with ``heads``: then ``out`` gets the queries.
        """
        assert (turned is not None) == (self._constants["D"] > 0), "heads turn, and nothing else does"
        values, scales = storage_of(weight)
        _, scaled, block_squares = hidden or (None, None, None)
        if turned is not None:
            assert turned.keys.is_contiguous()
            assert turned.values.is_contiguous()
            assert (turned.rotation.q_norm is not None) == self._constants["QK_NORM"]
        _, positions, slots, keys, kept = turned or (None,) * 5
        cos, sin, q_norm, k_norm, head_eps = turned.rotation if turned else (None, None, None, None, 0.0)
        product_kernel[(self.num_blocks, self.tiling.splits)](
            x, values, scales, out, squares, bias, scaled, next_norm, block_squares, peaks, parts, counters,
            cos, sin, positions, slots, keys, kept, q_norm, k_norm, 0 if keys is None else keys.stride(0),
            self._eps, head_eps, self._rows,
            COUNT=num_squares, PAD=triton.next_power_of_2(max(num_squares, 1)),
            QUANTIZED=scales is not None, NORMED=squares is not None, BIAS=bias is not None,
            RESIDUAL=hidden is not None, PEAKS=peaks is not None,
            **self._constants,
        )  # fmt: skip
