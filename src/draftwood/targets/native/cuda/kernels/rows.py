"""The small kernels around products and attention, with one program per row or per head of a row.

``embed`` and ``move_rows`` are part of every pass. The others are for wide passes, whose products come from the
vendor's library; narrow passes fuse them into their products.
"""

# ruff: noqa: N803 - compile-time values are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from draftwood.targets.native.cuda.attention import write_path
from draftwood.targets.native.cuda.common import launch_options, rms_norm, wait_for_input
from draftwood.targets.native.cuda.products import HALF_SCALE, CacheWrite, Hidden

MOVES_AT_ONCE = 32
HEADS_AT_ONCE = 8
GATE_BLOCK = 1024
EXPAND_BLOCK = 2048


class Ancestors(NamedTuple):
    """The nodes above each row in its tree."""

    words: torch.Tensor  # [N, W] as bits, see ``write_plan``
    afters: torch.Tensor  # [N] nodes of its tree written by earlier passes
    paths: torch.Tensor  # [N, PATH] as numbers, see ``write_path``


@triton.jit
def _embed(
    ids, table, states, scaled, squares, norm, words, afters, paths,
    SCALE: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr, PATH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row: its hidden states, and its path in the tree if PATH > 0."""
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    if PATH > 0:
        write_path(words, afters, paths, row, W, BITS, PATH)
    at = tl.arange(0, BLOCK)
    inside = at < H
    token = tl.load(ids + row).to(tl.int64)
    hidden = tl.load(table + token * H + at, mask=inside, other=0.0)
    wide = hidden.to(tl.float32)
    weight = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(states + row * H + at, hidden, mask=inside)
    tl.store(scaled + row * H + at, (wide * weight * SCALE).to(hidden.dtype), mask=inside)
    tl.store(squares + row, tl.sum(wide * wide, axis=0))


@triton.jit
def _rotate(
    qkv, cos, sin, positions, slots, keys, values, q_norm, k_norm, eps, head_stride,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr, QK_NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """AT_ONCE heads of one row: rotate queries in place, write rotated keys, and values, to the cache."""
    row = tl.program_id(0)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)  # [AT_ONCE]
    at = tl.arange(0, BLOCK)
    other = tl.where(at < HALF, at + HALF, at - HALF)  # the partner of each dimension
    slot = tl.load(slots + row).to(tl.int64)
    angle = tl.load(positions + row).to(tl.int64) * HALF + tl.minimum(at, other)
    c = tl.load(cos + angle, mask=at < D, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sin + angle, mask=at < D, other=0.0).to(tl.float32)[None, :]
    s = tl.where((at < HALF)[None, :], -s, s)
    wait_for_input(PDL, BRIEF=True)  # so that attention starts to prefetch its keys
    if slot < 0:  # a padding row
        return
    inside = (head < HEADS + 2 * KV)[:, None] & (at < D)[None, :]  # [AT_ONCE, BLOCK]
    here = qkv + row.to(tl.int64) * ((HEADS + 2 * KV) * D) + head[:, None] * D
    x = tl.load(here + at[None, :], mask=inside, other=0.0)
    partner = tl.load(here + other[None, :], mask=inside, other=0.0)
    own, theirs = x, partner
    if QK_NORM:
        norm = tl.where(head < HEADS, q_norm, k_norm)[:, None]
        # Both norms divide by the same sum of squares: x and partner each hold the whole head.
        own = rms_norm(x, norm, at[None, :], inside, eps, D, AXIS=1)
        theirs = rms_norm(partner, norm, other[None, :], inside, eps, D, AXIS=1)
    rotated = (own.to(tl.float32) * c + theirs.to(tl.float32) * s).to(x.dtype)
    is_query, is_value = head < HEADS, head >= HEADS + KV
    tl.debug_barrier()  # all threads have read before any writes
    tl.store(here + at[None, :], rotated, mask=inside & is_query[:, None])
    cached = tl.where(is_value, values, keys) + ((head - HEADS) % KV).to(tl.int64) * head_stride + slot * D
    kept = tl.where(is_value[:, None], x, rotated)
    tl.store(cached[:, None] + at[None, :], kept, mask=inside & (head >= HEADS)[:, None])


@triton.jit
def _move(
    keys, values, moves, head_stride,
    MAX_MOVES: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All moves of one head of one layer. moves [1 + 2 * MAX_MOVES]: their number, the sources, the targets."""
    wait_for_input(PDL)
    count = tl.load(moves)
    head = tl.program_id(0).to(tl.int64) * head_stride
    at = tl.arange(0, BLOCK)
    for first in range(0, count, ROWS):
        index = first + tl.arange(0, ROWS)
        there = (index < count)[:, None] & (at < D)[None, :]
        source = tl.load(moves + 1 + index, mask=index < count, other=0).to(tl.int64)
        target = tl.load(moves + 1 + MAX_MOVES + index, mask=index < count, other=0).to(tl.int64)
        key = tl.load(keys + head + source[:, None] * D + at[None, :], mask=there, other=0.0)
        value = tl.load(values + head + source[:, None] * D + at[None, :], mask=there, other=0.0)
        tl.debug_barrier()  # all loads before any store: a target may be the source of another move
        tl.store(keys + head + target[:, None] * D + at[None, :], key, mask=there)
        tl.store(values + head + target[:, None] * D + at[None, :], value, mask=there)
        tl.debug_barrier()


@triton.jit
def _norm(x, weight, out, eps, H: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64) * H
    at = tl.arange(0, BLOCK)
    inside = at < H
    values = tl.load(x + row + at, mask=inside, other=0.0)
    tl.store(out + row + at, rms_norm(values, weight, at, inside, eps, H), mask=inside)


@triton.jit
def _gate(gate_up, out, INNER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < INNER
    gate = tl.load(gate_up + row * (2 * INNER) + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * INNER) + INNER + at, mask=inside, other=0.0).to(tl.float32)
    result = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * INNER + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _expand(values, scales, out, IN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_input(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < IN
    wide = tl.load(values + row * IN + at, mask=inside).to(tl.float32) * tl.load(scales + row)
    tl.store(out + row * IN + at, wide.to(out.dtype.element_ty), mask=inside)


def embed(
    ids: torch.Tensor,
    table: torch.Tensor,
    norm: torch.Tensor,
    hidden: Hidden,
    ancestors: Ancestors | None,
    *,
    pdl: bool,
) -> None:
    """Write the embeddings of ``ids`` as hidden states for a normed product; ``hidden.squares`` gets one group.

    With ``ancestors``, also turn their words into paths.
    """
    width = table.shape[1]
    words, afters, paths = ancestors or (None, None, None)
    num_words, path = (0, 0) if words is None or paths is None else (words.shape[1], paths.shape[1])
    scale = HALF_SCALE if table.dtype == torch.float16 else 1.0
    _embed[(len(ids),)](
        ids, table, hidden.states, hidden.scaled, hidden.squares, norm, words, afters, paths,
        SCALE=scale, H=width, BLOCK=triton.next_power_of_2(width),
        W=num_words, BITS=triton.next_power_of_2(max(32 * num_words, 1)), PATH=path, PDL=pdl, **launch_options(pdl),
    )  # fmt: skip


def rotate_and_store(qkv: torch.Tensor, cache_write: CacheWrite, *, num_heads: int, pdl: bool) -> None:
    """Rotate the queries of ``qkv [N, (heads + 2 * kv_heads) * D]``; write rotated keys, and values, to their slots."""
    rotation, positions, slots, keys, values = cache_write
    num_kv_heads, _, dim = keys.shape
    cos, sin, q_norm, k_norm, eps = rotation
    _rotate[(len(slots), triton.cdiv(num_heads + 2 * num_kv_heads, HEADS_AT_ONCE))](
        qkv, cos, sin, positions, slots, keys, values, q_norm, k_norm, eps, keys.stride(0),
        HEADS=num_heads, KV=num_kv_heads, D=dim, HALF=dim // 2, BLOCK=triton.next_power_of_2(dim),
        AT_ONCE=HEADS_AT_ONCE, QK_NORM=q_norm is not None, PDL=pdl, **launch_options(pdl),
    )  # fmt: skip


def move_rows(keys: torch.Tensor, values: torch.Tensor, moves: torch.Tensor, *, pdl: bool) -> None:
    """Move rows of all layers' ``keys, values [layers, kv_heads, slots, D]`` to other slots.

    ``moves`` may hold several paths. Slots of a path ascend, its targets precede its sources, paths share no slots.
    """
    layers, heads, _, dim = keys.shape
    _move[(layers * heads,)](
        keys, values, moves, keys.stride(1),
        MAX_MOVES=(len(moves) - 1) // 2, D=dim, BLOCK=triton.next_power_of_2(dim), ROWS=MOVES_AT_ONCE, PDL=pdl,
        **launch_options(pdl),
    )  # fmt: skip


def norm_rows(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float, *, pdl: bool) -> None:
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    _norm[(len(x),)](x, weight, out, eps, H=width, BLOCK=block, PDL=pdl, **launch_options(pdl))


def gate_rows(gate_up: torch.Tensor, out: torch.Tensor, *, pdl: bool) -> None:
    """SiLU of the first half times the second: ``[N, 2 * inner]`` to ``[N, inner]``."""
    rows, inner = out.shape
    _gate[(rows, triton.cdiv(inner, GATE_BLOCK))](
        gate_up, out, INNER=inner, BLOCK=GATE_BLOCK, PDL=pdl, **launch_options(pdl)
    )


def expand(values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, *, pdl: bool) -> None:
    """Expand an 8-bit matrix, ``[out, in]`` with scales ``[out]``, to the dtype of ``out``."""
    num_out, num_in = values.shape
    grid = (num_out, triton.cdiv(num_in, EXPAND_BLOCK))
    _expand[grid](values, scales, out, IN=num_in, BLOCK=EXPAND_BLOCK, PDL=pdl, **launch_options(pdl))
