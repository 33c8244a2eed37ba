"""Attention of trees rooted at many positions of texts, without the scores in memory.

The rows of a text and a key head are all (root, node, query head) triples in order. One program takes a tile of rows,
which may cover several roots or part of one. It steps through the text up to the last position that any of its rows
sees, then through the nodes of the roots that it covers. Steps of text that every row of the tile sees need no mask.

Every row sees at least position 0 of its text, so each peak is finite after the first step of the online softmax.
"""

# ruff: noqa: N803 - compile-time arguments are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.targets.native.cuda.device import describe_gpu, on_device
from draftwood.targets.native.cuda.products import Gpu

Rows = tuple[Tensor, Tensor]  # keys and values

MIN_DIM = 16  # of a product on tensor cores
MAX_STAGES = 3
BEYOND = tl.constexpr(0x7FFFFFFF)


class Tiles(NamedTuple):
    """The tiling of a launch."""

    block_m: int  # rows per program
    block_s: int  # keys per step
    num_warps: int
    num_stages: int


@triton.jit
def _load_rows(start, offsets, there, depth, D: tl.constexpr):
    """Load keys or values at these offsets, [keys, BLOCK_D]; zeros where ``there`` is false."""
    where = start + offsets[:, None] + depth[None, :]
    return tl.load(where, mask=there[:, None] & (depth < D)[None, :], other=0.0)


@triton.jit
def _softmax_step(scores, value, mixed, peak, total, scale):
    """One step of the online softmax, with powers of two. ``peak`` is the maximum of the scaled scores so far, finite
    after the first step."""
    higher = tl.maximum(peak, tl.max(scores, axis=1) * scale)  # [BLOCK_M]
    weights = tl.exp2(scores * scale - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(value.dtype), value, mixed * shrink[:, None])
    return mixed, higher, total


@triton.jit
def _attend_text(
    rows, last, keys, values, key_stride, value_stride, low, high, end, mixed, peak, total, scale, depth,
    D: tl.constexpr, BLOCK_S: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The steps from ``low`` to ``high`` through a text that is read up to ``end``."""
    for block in range(low, high):
        at = block * BLOCK_S + tl.arange(0, BLOCK_S)
        there = at < end
        key = _load_rows(keys, at.to(tl.int64) * key_stride, there, depth, D)
        value = _load_rows(values, at.to(tl.int64) * value_stride, there, depth, D)
        scores = tl.dot(rows, tl.trans(key))  # [BLOCK_M, BLOCK_S]
        if MASKED:
            scores = tl.where(at[None, :] <= last[:, None], scores, float("-inf"))
        mixed, peak, total = _softmax_step(scores, value, mixed, peak, total, scale)
    return mixed, peak, total


@triton.jit(do_not_specialize=["num_text", "num_roots", "width", "num_below"])
def _attend(
    query, text_key, text_value, node_key, node_value, last, ancestors, out, scale,
    num_text, num_roots, width, num_below,
    query_text, query_root, query_node, query_head,
    text_key_text, text_key_at, text_key_head, text_value_text, text_value_at, text_value_head,
    node_key_text, node_key_root, node_key_node, node_key_head,
    node_value_text, node_value_root, node_value_node, node_value_head,
    D: tl.constexpr, BLOCK_D: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One tile of rows, one key head, one text. Strides are named ``tensor_dimension``."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # later roots see more text: start the longest programs first
    head = tl.program_id(1).to(tl.int64)
    text = tl.program_id(2).to(tl.int64)
    line = tile * BLOCK_M + tl.arange(0, BLOCK_M)  # (root * width + node) * G + query head
    used = line < num_roots * width * G
    place = line // G
    root = place // width
    depth = tl.arange(0, BLOCK_D)
    inside = used[:, None] & (depth < D)[None, :]

    query += text * query_text + head * G * query_head
    lines = root.to(tl.int64) * query_root + (place % width).to(tl.int64) * query_node + (line % G) * query_head
    rows = tl.load(query + lines[:, None] + depth[None, :], mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
    seen = tl.load(last + text * num_roots + root, mask=used, other=0)
    seen = tl.minimum(seen, num_text - 1).to(tl.int32)
    end = tl.max(seen, axis=0) + 1
    whole = (tl.min(tl.where(used, seen, BEYOND), axis=0) + 1) // BLOCK_S  # steps that every row sees in full

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    text_key += text * text_key_text + head * text_key_head
    text_value += text * text_value_text + head * text_value_head
    mixed, peak, total = _attend_text(
        rows, seen, text_key, text_value, text_key_at, text_value_at, 0, whole, end, mixed, peak, total, scale, depth,
        D, BLOCK_S, False,
    )  # fmt: skip
    mixed, peak, total = _attend_text(
        rows, seen, text_key, text_value, text_key_at, text_value_at, whole, tl.cdiv(end, BLOCK_S), end,
        mixed, peak, total, scale, depth, D, BLOCK_S, True,
    )  # fmt: skip

    first_place = tile * BLOCK_M // G
    first_root = first_place // width
    last_place = (tl.minimum((tile + 1) * BLOCK_M, num_roots * width * G) - 1) // G
    below = (last_place // width + 1 - first_root) * num_below  # nodes of the roots that the tile covers
    node_key += text * node_key_text + first_root.to(tl.int64) * node_key_root + head * node_key_head
    node_value += text * node_value_text + first_root.to(tl.int64) * node_value_root + head * node_value_head
    ancestors += (text * num_roots * width + first_place) * num_below
    above = (place - first_place) * num_below  # [BLOCK_M] where a row's ancestor flags begin
    for first in range(0, below, BLOCK_S):
        at = first + tl.arange(0, BLOCK_S)
        there = at < below
        key_root = at // num_below
        node = at % num_below
        key_at = key_root.to(tl.int64) * node_key_root + node.to(tl.int64) * node_key_node
        value_at = key_root.to(tl.int64) * node_value_root + node.to(tl.int64) * node_value_node
        key = _load_rows(node_key, key_at, there, depth, D)
        value = _load_rows(node_value, value_at, there, depth, D)
        scores = tl.dot(rows, tl.trans(key))
        own = there[None, :] & (key_root[None, :] == (root - first_root)[:, None])  # false in rows beyond the end
        sees = tl.load(ancestors + above[:, None] + node[None, :], mask=own, other=0)
        scores = tl.where(sees != 0, scores, float("-inf"))
        mixed, peak, total = _softmax_step(scores, value, mixed, peak, total, scale)

    out += (text * num_roots * width * tl.num_programs(1) + head) * G * D
    result = place.to(tl.int64) * (tl.num_programs(1) * G * D) + (line % G) * D
    tl.store(out + result[:, None] + depth[None, :], (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)


def forest_attention(query: Tensor, text: Rows, nodes: Rows, last: Tensor, ancestors: Tensor) -> Tensor:
    """Attention of ``query [B, R, k, heads, D]`` over the ``text [B, S, kv_heads, D]`` up to and including the position
    ``last [B, R]``, and over those ``nodes [B, R, m, kv_heads, D]`` that are ``ancestors [B, R, k, m]``.

    Half precision. Tensors may be views. Computes no gradients.
    """
    num_texts, num_roots, width, heads, dim = query.shape
    num_text, kv_heads = text[0].shape[1:3]
    group = heads // kv_heads
    num_rows = num_roots * width * group
    out = query.new_empty(query.shape)
    if not out.numel():
        return out
    given = [each if each.stride(-1) == 1 else each.contiguous() for each in (query, *text, *nodes)]
    tiles = choose_tiles(num_rows, num_texts * kv_heads, dim, describe_gpu(query.device))
    with on_device(query.device):
        _attend[(triton.cdiv(num_rows, tiles.block_m), kv_heads, num_texts)](
            *given, last.contiguous(), ancestors.contiguous().view(torch.uint8), out, dim**-0.5 * math.log2(math.e),
            num_text, num_roots, width, ancestors.shape[-1],
            *(stride for each in given for stride in each.stride()[:-1]),
            D=dim, BLOCK_D=pad_dim(dim), G=group, BLOCK_M=tiles.block_m, BLOCK_S=tiles.block_s,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return out


def choose_tiles(num_rows: int, num_walks: int, dim: int, gpu: Gpu) -> Tiles:
    """Choose a tiling for ``num_rows`` rows in each of ``num_walks`` pairs of text and key head.

    Tiles are large if that keeps all processors busy and their values stay in registers with every compiler version.
    There are as many stages as fit into shared memory.
    """
    size = pad_dim(dim)
    large = size <= 64 and triton.cdiv(num_rows, 128) * num_walks >= gpu.num_processors
    block_m = 128 if large else 64
    block_s = 64 if size <= 64 else 32 if size <= 128 else 16
    ahead = (gpu.shared_bytes // (2 * size) - block_m) // (2 * block_s)
    return Tiles(block_m, block_s, num_warps=8 if large or size > 64 else 4, num_stages=max(1, min(ahead, MAX_STAGES)))


def pad_dim(dim: int) -> int:
    return max(MIN_DIM, 1 << (dim - 1).bit_length())
