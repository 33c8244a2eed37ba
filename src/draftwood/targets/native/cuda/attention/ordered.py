"""Tree attention of one layer over a packed batch, with keys in the order of positions: for exact passes.

A node's result has the same bits whether it is alone, in a tree of any shape, in a prompt chunk or beside other
requests. For that its keys are visited in the order of positions:

- Keys are in *blocks* that begin at fixed positions. The softmax of a block is computed on its own, and folded into
  what came before.
- Blocks are in *ranges*, also at fixed positions, which grow with the position (``find_range``). Blocks are folded into
  their range in order, and ranges into the result in order, by the same operation wherever it happens.
- All sums over keys are computed by the tensor cores, which add them in order and skip masked ones without a trace.

There are two kernels. A program of the first takes the nodes of a query tile, with all query heads that share a key
head, and steps through ranges of the keys that all nodes of the tile have in common: for a tree the blocks that are
wholly committed, for a chain (a prompt chunk, or a single node) all blocks. It finishes the tile if it ran all ranges
of a chain, or was the last one to finish for a single node. A program of the second kernel finishes one node of another
tile: it gathers the keys of the remaining blocks along the node's own path, and merges what the first kernel left.
"""

# ruff: noqa: N803 - compile-time arguments are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from draftwood.targets.native.cuda.attention.kernel import prefetch_keys
from draftwood.targets.native.cuda.attention.plan import TILE_FIELDS
from draftwood.targets.native.cuda.attention.ranges import OrderedConfig
from draftwood.targets.native.cuda.common import launch_options, wait_for_input

NODE_ROWS = tl.constexpr(16)  # query rows of a program of the second kernel: the heads of one node
NODE_WARPS = 4
ONES = tl.constexpr(16)  # columns of ones that sum up the weights of a block


@triton.jit
def _range_of(block):
    """The range that a block is in, as ``find_range`` in ranges.py."""
    power = (tl.maximum(block, 32).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127  # log2, rounded down
    return 16 * (power - 5) + (block >> (power - 4))


@triton.jit
def _range_start(index):
    """The first block of a range."""
    return tl.where(index < 16, 2 * index, (index % 16 + 16) << (index // 16))


@triton.jit
def _load_rows(start, at, there, depth, slot_stride, D: tl.constexpr):
    """Load the rows ``at`` of keys or values, [keys, BLOCK_D]; zeros where ``there`` is false."""
    where = start + at.to(tl.int64)[:, None] * slot_stride + depth[None, :]
    return tl.load(where, mask=there[:, None] & (depth < D)[None, :], other=0.0)


@triton.jit
def _attend_block(rows, key, value, seen, scale):
    """The softmax of one block on its own: mixed values, peak of the scaled scores, total of the weights."""
    scores = tl.dot(rows, tl.trans(key), input_precision="ieee")
    scores = tl.where(seen, scores, float("-inf"))
    peak = tl.max(scores, axis=1) * scale  # -inf: no key is seen
    base = tl.where(peak == float("-inf"), 0.0, peak)
    below = tl.broadcast_to(-base[:, None], scores.shape)
    weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), below)).to(value.dtype)
    mixed = tl.dot(weights, value, input_precision="ieee")
    ones = tl.full((value.shape[0], ONES), 1.0, value.dtype)
    total = tl.max(tl.dot(weights, ones, input_precision="ieee"), axis=1)  # all columns are the same
    return mixed, peak, total


@triton.jit
def _fold(mixed, peak, total, more, more_peak, more_total):
    """Fold a block into its range, or a range into the result. One that saw no key changes no bit."""
    higher = tl.maximum(peak, more_peak)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    share, more_share = tl.exp2(peak - base), tl.exp2(more_peak - base)
    mixed = tl.fma(mixed, tl.broadcast_to(share[:, None], mixed.shape), more * more_share[:, None])
    return mixed, higher, tl.fma(total, share, more_total * more_share)


@triton.jit
def _nothing(ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """The result of no keys."""
    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    return tl.zeros((ROWS, BLOCK_D), tl.float32), peak, tl.zeros((ROWS,), tl.float32)


@triton.jit
def _attend_range(
    rows, keys, values, place, low, high, end, depth, slot_stride, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """The blocks from ``low`` to ``high``, for rows at the positions ``place``. Slot i has position i."""
    mixed, peak, total = _nothing(BLOCK_M, BLOCK_D)
    for block in range(low, high):
        at = block * BLOCK_S + tl.arange(0, BLOCK_S)
        key = _load_rows(keys, at, at < end, depth, slot_stride, D)
        value = _load_rows(values, at, at < end, depth, slot_stride, D)
        seen = at[None, :] <= place[:, None]
        if WINDOW > 0:
            seen = seen & (place[:, None] - at[None, :] < WINDOW)
        more, more_peak, more_total = _attend_block(rows, key, value, seen, scale)
        mixed, peak, total = _fold(mixed, peak, total, more, more_peak, more_total)
    return mixed, peak, total


@triton.jit
def _store_part(
    part, mixed, peak, total, line, used, depth, D: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    tl.store(part + line[:, None] * D + depth[None, :], mixed, mask=used[:, None] & (depth < D)[None, :])
    tl.store(part + BLOCK_M * D + line, peak, mask=used)
    tl.store(part + BLOCK_M * (D + 1) + line, total, mask=used)


@triton.jit
def _load_part(part, line, there, depth, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """The rows ``line`` of a partial result: nothing where ``there`` is false."""
    inside = there[:, None] & (depth < D)[None, :]
    mixed = tl.load(part + line[:, None] * D + depth[None, :], mask=inside, other=0.0, cache_modifier=".cg")
    peak = tl.load(part + BLOCK_M * D + line, mask=there, other=float("-inf"), cache_modifier=".cg")
    total = tl.load(part + BLOCK_M * (D + 1) + line, mask=there, other=0.0, cache_modifier=".cg")
    return mixed, peak, total


@triton.jit
def _attend_tile(
    query, keys, values, positions, out, parts, arrivals, first_row, nodes, prefix, end, chain, first_block, last_block,
    first, last, program, head, split, scale, query_stride, out_stride, slot_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, LOADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Every SPLITS-th range from ``first`` to ``last``, of the blocks from ``first_block`` to ``last_block``."""
    line = tl.arange(0, BLOCK_M)  # node * G + query head
    node = line // G
    used = node < nodes
    row = first_row + node
    depth = tl.arange(0, BLOCK_D)
    inside = used[:, None] & (depth < D)[None, :]
    column = (line % G)[:, None] * D
    if PDL:
        low = tl.maximum(_range_start(first + split), first_block)
        high = tl.minimum(_range_start(first + split + 1), last_block)
        prefetch_keys(keys, values, low, high, prefix, slot_stride, BLOCK_S, D)
    place = tl.load(positions + row, mask=used, other=-1)  # [BLOCK_M]
    lines = query + row.to(tl.int64)[:, None] * query_stride + head * (G * D) + column
    wait_for_input(PDL)
    rows = tl.load(lines + depth[None, :], mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
    if SPLITS > 1:
        for index in range(first + split, last + 1, SPLITS):
            low = tl.maximum(_range_start(index), first_block)
            high = tl.minimum(_range_start(index + 1), last_block)
            mixed, peak, total = _attend_range(
                rows, keys, values, place, low, high, end, depth, slot_stride, scale,
                D, BLOCK_D, BLOCK_M, BLOCK_S, WINDOW,
            )  # fmt: skip
            part = parts + (index - first) * (BLOCK_M * (D + 2))
            _store_part(part, mixed, peak, total, line, used, depth, D, BLOCK_M)
    else:
        mixed, peak, total = _nothing(BLOCK_M, BLOCK_D)
        more, more_peak, more_total = _nothing(BLOCK_M, BLOCK_D)
        for index in range(first, last + 1):
            mixed, peak, total = _fold(mixed, peak, total, more, more_peak, more_total)
            low = tl.maximum(_range_start(index), first_block)
            high = tl.minimum(_range_start(index + 1), last_block)
            more, more_peak, more_total = _attend_range(
                rows, keys, values, place, low, high, end, depth, slot_stride, scale,
                D, BLOCK_D, BLOCK_M, BLOCK_S, WINDOW,
            )  # fmt: skip
        if chain:
            mixed, peak, total = _fold(mixed, peak, total, more, more_peak, more_total)
            whole = out + row.to(tl.int64)[:, None] * out_stride + head * (G * D) + column + depth[None, :]
            tl.store(whole, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
        else:
            _store_part(parts, mixed, peak, total, line, used, depth, D, BLOCK_M)
            part = parts + BLOCK_M * (D + 2)
            _store_part(part, more, more_peak, more_total, line, used, depth, D, BLOCK_M)
    if SPLITS > 1 and (chain != 0) & (nodes == 1):
        tl.debug_barrier()  # all warps have stored before the arrival is counted
        arrived = tl.atomic_add(arrivals + program, 1, sem="acq_rel")
        if arrived == tl.minimum(last - first + 1, SPLITS) - 1:
            head_row = tl.arange(0, ROWS)
            there = head_row < G
            whole, _, total_of = _merge(
                parts, last - first + 1, head_row, there, depth, D, BLOCK_D, BLOCK_M, ROWS, LOADS
            )
            where = out + first_row.to(tl.int64) * out_stride + head * (G * D) + head_row[:, None] * D + depth[None, :]
            result = (whole / total_of[:, None]).to(out.dtype.element_ty)
            tl.store(where, result, mask=there[:, None] & (depth < D)[None, :])
            tl.store(arrivals + program, 0)  # for the next launch


@triton.jit
def _merge(
    parts, num_parts, line, there, depth,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, LOADS: tl.constexpr,
):  # fmt: skip
    """Fold the rows ``line`` of the first ``num_parts`` partial results, LOADS of which are loaded together."""
    mixed, peak, total = _nothing(ROWS, BLOCK_D)
    for start in range(0, num_parts, LOADS):
        for number in tl.static_range(LOADS):
            part = parts + (start + number) * (BLOCK_M * (D + 2))
            inside = there & (start + number < num_parts)
            other, other_peak, other_total = _load_part(part, line, inside, depth, D, BLOCK_M)
            mixed, peak, total = _fold(mixed, peak, total, other, other_peak, other_total)
    return mixed, peak, total


@triton.jit
def _attend_path(
    rows, keys, values, paths, row, place, block, prefix, depth, slot_stride, scale,
    D: tl.constexpr, BLOCK_S: tl.constexpr, PATH: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """A block of keys along the path of the node at ``place``: committed ones, then its ancestors and itself."""
    at = block * BLOCK_S + tl.arange(0, BLOCK_S)
    seen = at <= place
    if WINDOW > 0:
        seen = seen & (place - at < WINDOW)
    ancestor = tl.load(paths + row.to(tl.int64) * PATH + (place - at), mask=seen & (at >= prefix), other=0)
    slot = tl.where(at < prefix, at, prefix + ancestor.to(tl.int32))
    key = _load_rows(keys, slot, seen, depth, slot_stride, D)
    value = _load_rows(values, slot, seen, depth, slot_stride, D)
    return _attend_block(rows, key, value, tl.broadcast_to(seen[None, :], (NODE_ROWS, BLOCK_S)), scale)


@triton.jit
def _bounds(
    positions, first_row, nodes, prefix, segment_row, chain,
    BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Of the keys that all nodes of a tile share: end, first block, end of the blocks, first and last range."""
    end = tl.where(chain != 0, prefix + first_row - segment_row + nodes, prefix)
    last_block = tl.where(chain != 0, tl.cdiv(end, BLOCK_S), prefix // BLOCK_S)
    first_block = 0
    if WINDOW > 0:  # the first block that is inside the window of any node
        node = tl.arange(0, BLOCK_M)
        own = tl.load(positions + first_row + node, mask=node < nodes, other=0x7FFFFFFF)
        first_block = tl.minimum(tl.maximum(tl.min(own, axis=0) - WINDOW + 1, 0), prefix) // BLOCK_S
    last = _range_of(tl.where(chain != 0, last_block - 1, last_block))
    return end, first_block, last_block, _range_of(first_block), last


@triton.jit
def _attend(
    query, keys, values, tiles, positions, out, parts, arrivals,
    scale, query_stride, out_stride, head_stride, slot_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, LOADS: tl.constexpr,
    FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile and one key head, one of SPLITS programs: the keys that all nodes of the tile share."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = tiles + tile * FIELDS
    first_row = tl.load(fields)
    nodes = tl.load(fields + 1)
    base = tl.load(fields + 2)
    prefix = tl.load(fields + 3)
    segment_row = tl.load(fields + 4)
    chain = tl.load(fields + 5)
    if nodes == 0:
        return
    end, first_block, last_block, first, last = _bounds(
        positions, first_row, nodes, prefix, segment_row, chain, BLOCK_M, BLOCK_S, WINDOW
    )
    if first + split > last:
        return
    offset = head.to(tl.int64) * head_stride + base.to(tl.int64) * slot_stride
    program = tile * tl.num_programs(1) + head
    _attend_tile(
        query, keys + offset, values + offset, positions, out,
        parts + program.to(tl.int64) * (PARTS * BLOCK_M * (D + 2)), arrivals, first_row, nodes, prefix, end, chain,
        first_block, last_block, first, last, program, head, split, scale, query_stride, out_stride, slot_stride,
        D, BLOCK_D, G, BLOCK_M, BLOCK_S, SPLITS, WINDOW, ROWS, LOADS, PDL,
    )  # fmt: skip


@triton.jit
def _finish(
    query, keys, values, tiles, paths, positions, out, parts,
    scale, query_stride, out_stride, head_stride, slot_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    SPLITS: tl.constexpr, PARTS: tl.constexpr, PATH: tl.constexpr, WINDOW: tl.constexpr, LOADS: tl.constexpr,
    FIELDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One node of a tile and one key head, unless the first kernel has finished it."""
    tile, head, index = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = tiles + tile * FIELDS
    first_row = tl.load(fields)
    nodes = tl.load(fields + 1)
    base = tl.load(fields + 2)
    prefix = tl.load(fields + 3)
    segment_row = tl.load(fields + 4)
    chain = tl.load(fields + 5)
    if index >= nodes or (chain != 0 and (SPLITS == 1 or nodes == 1)):
        wait_for_input(PDL)  # whoever waits for this kernel relies on the first one too
        return
    _, _, last_block, first, last = _bounds(
        positions, first_row, nodes, prefix, segment_row, chain, BLOCK_M, BLOCK_S, WINDOW
    )
    offset = head.to(tl.int64) * head_stride + base.to(tl.int64) * slot_stride
    keys += offset
    values += offset
    parts += (tile * tl.num_programs(1) + head).to(tl.int64) * (PARTS * BLOCK_M * (D + 2))
    num_parts = 2 if SPLITS == 1 else last - first + 1
    row = first_row + index
    head_row = tl.arange(0, NODE_ROWS)
    used = head_row < G
    depth = tl.arange(0, BLOCK_D)
    inside = used[:, None] & (depth < D)[None, :]
    lines = head * (G * D) + head_row[:, None] * D + depth[None, :]
    place = tl.load(positions + row)
    last_own = tl.where(chain != 0, last_block - 1, place // BLOCK_S)  # chains have no blocks of their own
    more, more_peak, more_total = _nothing(NODE_ROWS, BLOCK_D)
    if last_block <= last_own:  # queries and keys are older than the first kernel: no need to wait for it
        rows = tl.load(query + row.to(tl.int64) * query_stride + lines, mask=inside, other=0.0)
        more, more_peak, more_total = _attend_path(
            rows, keys, values, paths, row, place, last_block, prefix, depth, slot_stride, scale,
            D, BLOCK_S, PATH, WINDOW,
        )  # fmt: skip
    wait_for_input(PDL)
    line = index * G + head_row
    mixed, peak, total = _merge(parts, num_parts - 1, line, used, depth, D, BLOCK_D, BLOCK_M, NODE_ROWS, LOADS)
    part = parts + (num_parts - 1) * (BLOCK_M * (D + 2))
    own, own_peak, own_total = _load_part(part, line, used, depth, D, BLOCK_M)  # the range that the own blocks continue
    own, own_peak, own_total = _fold(own, own_peak, own_total, more, more_peak, more_total)
    for block in range(last_block + 1, last_own + 1):
        if block == _range_start(_range_of(block)):
            mixed, peak, total = _fold(mixed, peak, total, own, own_peak, own_total)
            own, own_peak, own_total = _nothing(NODE_ROWS, BLOCK_D)
        rows = tl.load(query + row.to(tl.int64) * query_stride + lines, mask=inside, other=0.0)
        more, more_peak, more_total = _attend_path(
            rows, keys, values, paths, row, place, block, prefix, depth, slot_stride, scale,
            D, BLOCK_S, PATH, WINDOW,
        )  # fmt: skip
        own, own_peak, own_total = _fold(own, own_peak, own_total, more, more_peak, more_total)
    mixed, peak, total = _fold(mixed, peak, total, own, own_peak, own_total)
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + row.to(tl.int64) * out_stride + lines, result, mask=inside)


def ordered_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    paths: torch.Tensor | None,
    positions: torch.Tensor,
    out: torch.Tensor,
    parts: torch.Tensor,
    arrivals: torch.Tensor,
    *,
    config: OrderedConfig,
    window: int = 0,
    pdl: bool = False,
) -> None:
    """Launch the attention of one layer. Allocates nothing and does not wait.

    ``query [N, >= heads * D]`` (the queries are the first columns) attends over ``keys, values [kv_heads, slots, D]``,
    both with the same strides; the result goes to ``out [N, heads * D]``. ``tiles [T, TILE_FIELDS]`` and
    ``positions [N]`` are int32, see ``write_plan``; ``paths [N, PATH]`` are the nodes above each row, see
    ``write_path`` in paths.py, and may be None if all segments are single new nodes. ``parts`` and ``arrivals``: see
    ``scratch_size``.
    Queries must be rotated, and the nodes' keys and values stored in their slots.
    """
    num_kv_heads, _, dim = keys.shape
    shape = {
        "D": dim,
        "BLOCK_D": triton.next_power_of_2(dim),
        "G": config.group,
        "BLOCK_M": config.block_m,
        "BLOCK_S": config.block_s,
        "SPLITS": config.splits,
        "PARTS": config.num_parts,
        "WINDOW": window,
        "FIELDS": TILE_FIELDS,
        "PDL": pdl,
        **launch_options(pdl),
    }
    scale = dim**-0.5 * math.log2(math.e)
    strides = query.stride(0), out.stride(0), keys.stride(0), keys.stride(1)
    rows = triton.next_power_of_2(config.group)
    _attend[(len(tiles), num_kv_heads, config.splits)](
        query, keys, values, tiles, positions, out, parts, arrivals, scale, *strides,
        ROWS=rows, LOADS=config.loads(rows, dim), num_warps=config.num_warps, num_stages=config.num_stages, **shape,
    )  # fmt: skip
    if paths is not None:
        _finish[(len(tiles), num_kv_heads, config.nodes_per_tile)](
            query, keys, values, tiles, paths, positions, out, parts, scale, *strides,
            PATH=paths.shape[1], LOADS=config.loads(NODE_ROWS.value, dim), num_warps=NODE_WARPS, **shape,
        )  # fmt: skip
