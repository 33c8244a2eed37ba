"""Tree attention of one layer over a packed batch.

One program takes the nodes of a query tile, with all query heads that share a key head, and steps through a range of
the keys: the sequence's prefix in the cache, then the nodes up to the tile's last one. A node sees the whole prefix, or
the part inside its window. Among the nodes it sees those in its ancestor bits; in a chain, itself and all before it.
Nodes are in topological order, so nothing after the tile's last node is visible. Nodes of the tree that earlier passes
wrote are in the cache between the prefix and the new nodes.

The keys of long contexts are split into ranges. How many are used depends on the tile's number of keys, which is read
on the GPU: one captured launch serves every context. Partial results are merged in the order of the ranges, so the same
input gives the same bits.
"""

# ruff: noqa: N803 - compile-time arguments are in capitals
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import math

import torch
import triton
import triton.language as tl

from draftwood.targets.native.cuda.attention.plan import WORD_BITS, AttentionConfig
from draftwood.targets.native.cuda.common import launch_options, prefetch, wait_for_input

MERGE_WARPS = 2
MERGE_ROWS = 4  # rows per program of the merging kernel; a tile's last program merges more at a time
AHEAD_BLOCKS = tl.constexpr(8)  # steps of a range that are prefetched before the queries are ready


@triton.jit
def _first_block(
    positions, first_row, nodes, prefix, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr
):
    """The first block of the prefix that is inside the window of any node of the tile. There, slot i has position i."""
    first = 0
    if WINDOW > 0:
        node = tl.arange(0, BLOCK_M)
        own = tl.load(positions + first_row + node, mask=node < nodes, other=0x7FFFFFFF)
        first = tl.minimum(tl.maximum(tl.min(own, axis=0) - WINDOW + 1, 0), prefix) // BLOCK_S
    return first


@triton.jit
def _ranges(first, last, SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr):
    """Split the blocks from ``first`` to ``last`` into ranges: blocks per range, and number of ranges."""
    wanted = tl.minimum(tl.maximum((last - first) // MIN_BLOCKS, 1), SPLITS)
    size = tl.maximum(tl.cdiv(last - first, wanted), 1)  # not 0 for a tile without nodes
    return size, tl.cdiv(last - first, size)


@triton.jit
def _load_rows(start, at, end, depth, slot_stride, D: tl.constexpr):
    """Load the rows ``at`` of keys or values, [BLOCK_S, BLOCK_D]; zeros from ``end`` on."""
    where = start + at[:, None] * slot_stride + depth[None, :]
    return tl.load(where, mask=(at < end)[:, None] & (depth < D)[None, :], other=0.0)


@triton.jit
def _seen_nodes(
    words, num_words, first_node, node, own, used, row, chain, SPAN: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Whether each row's node ``own`` sees each of the nodes ``node``, which start at ``first_node``.

    [BLOCK_M, BLOCK_N]. They lie in SPAN words; 0: all segments are chains.
    """
    seen = node[None, :] <= own[:, None]
    if SPAN > 0:
        first_word = first_node // BITS
        word = tl.zeros(seen.shape, tl.int32)
        for index in tl.static_range(SPAN):
            current = first_word + index
            mine = tl.load(words + row * num_words + current, mask=used & (current < num_words) & (chain == 0), other=0)
            word = tl.where((node >> 5)[None, :] == current, mine[:, None], word)
        seen = seen & ((((word >> (node & 31)[None, :]) & 1) != 0) | (chain != 0))
    return seen


@triton.jit
def _softmax_step(scores, values, mixed, peak, total, scale):
    """One step of the online softmax, with powers of two. ``peak`` is the maximum of the scaled scores so far."""
    higher = tl.maximum(peak, tl.max(scores, axis=1) * scale)  # [BLOCK_M]
    base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf: the row has seen no key yet
    weights = tl.exp2(scores * scale - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * shrink[:, None], input_precision="ieee")
    return mixed, higher, total


@triton.jit
def _merge(
    parts, out, out_stride, first, used_rows, used_ranges,
    D: tl.constexpr, BLOCK_D: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr, SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Merge ROWS rows of a tile from the partial results of its ranges; ``out`` points to the tile's first row."""
    row = first + tl.arange(0, ROWS)
    depth = tl.arange(0, BLOCK_D)
    inside = (row < used_rows)[:, None] & (depth < D)[None, :]
    sums = parts + BLOCK_M * D + row
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    for split in tl.static_range(SPLITS):  # unrolled, so that all loads are in flight together
        there = (row < used_rows) & (split < used_ranges)
        peak = tl.load(sums + split * (BLOCK_M * (D + 2)), mask=there, other=float("-inf"), cache_modifier=".cg")
        highest = tl.maximum(highest, peak)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    whole = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for split in tl.static_range(SPLITS):
        part = split * (BLOCK_M * (D + 2))
        there = (row < used_rows) & (split < used_ranges)
        peak = tl.load(sums + part, mask=there, other=float("-inf"), cache_modifier=".cg")
        total = tl.load(sums + part + BLOCK_M, mask=there, other=0.0, cache_modifier=".cg")
        where = parts + part + row[:, None] * D + depth[None, :]
        mixed = tl.load(where, mask=inside & (split < used_ranges), other=0.0, cache_modifier=".cg")
        share = tl.exp2(peak - highest)
        whole += share * total
        result += share[:, None] * mixed
    result = result / whole[:, None]
    there_out = (row // G)[:, None] * out_stride + (row % G)[:, None] * D + depth[None, :]
    tl.store(out + there_out, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def prefetch_keys(keys, values, low, high, prefix, slot_stride, BLOCK_S: tl.constexpr, D: tl.constexpr):
    """Prefetch the first blocks of a range. Only those in the prefix, which earlier passes have written."""
    whole = tl.minimum(high, prefix // BLOCK_S)
    if whole > low:
        block = tl.minimum(low + tl.arange(0, AHEAD_BLOCKS), whole - 1)
        where = block.to(tl.int64) * (BLOCK_S * slot_stride)
        prefetch((keys + where).to(tl.int64), BLOCK_S * D * 2)
        prefetch((values + where).to(tl.int64), BLOCK_S * D * 2)


@triton.jit(do_not_specialize=["num_words"])
def _attend(
    query, keys, values, tiles, words, num_words, positions, out, parts, arrivals,
    scale, query_stride, out_stride, head_stride, slot_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr, SPAN: tl.constexpr,
    BITS: tl.constexpr, WINDOW: tl.constexpr, FIELDS: tl.constexpr,
    LAST_MERGES: tl.constexpr, MERGE_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile, one key head, one range of keys."""
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    fields = tiles + tile * FIELDS
    first_row = tl.load(fields)
    nodes = tl.load(fields + 1)
    base = tl.load(fields + 2)
    prefix = tl.load(fields + 3)
    segment_row = tl.load(fields + 4)
    chain = tl.load(fields + 5)
    earlier = tl.load(fields + 6)  # nodes written by earlier passes
    if nodes == 0:
        return
    before = first_row - segment_row  # nodes of the segment before the tile
    first_block = _first_block(positions, first_row, nodes, prefix, WINDOW, BLOCK_M, BLOCK_S)
    prefix_blocks = tl.cdiv(prefix, BLOCK_S)
    cached_blocks = prefix_blocks + tl.cdiv(earlier, BLOCK_N)
    last_block = cached_blocks + tl.cdiv(before + nodes, BLOCK_N)
    size, used_ranges = _ranges(first_block, last_block, SPLITS, MIN_BLOCKS)
    if split >= used_ranges:
        return
    low = first_block + split * size
    high = tl.minimum(low + size, last_block)

    line = tl.arange(0, BLOCK_M)  # node * G + query head
    node = line // G
    used = node < nodes
    row = first_row + node
    depth = tl.arange(0, BLOCK_D)
    inside = used[:, None] & (depth < D)[None, :]
    column = (line % G)[:, None] * D
    offset = head.to(tl.int64) * head_stride + base.to(tl.int64) * slot_stride
    keys += offset
    values += offset
    if PDL:
        prefetch_keys(keys, values, low, high, prefix, slot_stride, BLOCK_S, D)
    if WINDOW > 0:
        place = tl.load(positions + row, mask=used, other=0)  # [BLOCK_M]
    lines = query + row.to(tl.int64)[:, None] * query_stride + head * (G * D) + column
    wait_for_input(PDL)
    rows = tl.load(lines + depth[None, :], mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]

    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for block in range(low, tl.minimum(high, prefix_blocks)):
        at = block * BLOCK_S + tl.arange(0, BLOCK_S)
        key = _load_rows(keys, at, prefix, depth, slot_stride, D)
        value = _load_rows(values, at, prefix, depth, slot_stride, D)
        scores = tl.dot(rows, tl.trans(key), input_precision="ieee")  # [BLOCK_M, BLOCK_S]
        if WINDOW > 0:
            scores = tl.where(place[:, None] - at[None, :] < WINDOW, scores, float("-inf"))
        if (block + 1) * BLOCK_S > prefix:
            scores = tl.where((at < prefix)[None, :], scores, float("-inf"))
        mixed, peak, total = _softmax_step(scores, value, mixed, peak, total, scale)
    cached = prefix + earlier
    for block in range(tl.maximum(low, prefix_blocks), tl.minimum(high, cached_blocks)):
        first_node = (block - prefix_blocks) * BLOCK_N
        at = first_node + tl.arange(0, BLOCK_N)
        key = _load_rows(keys, prefix + at, cached, depth, slot_stride, D)
        value = _load_rows(values, prefix + at, cached, depth, slot_stride, D)
        scores = tl.dot(rows, tl.trans(key), input_precision="ieee")
        bit = (num_words - tl.cdiv(earlier, BITS)) * BITS  # they use the last words
        every = tl.zeros((BLOCK_M,), tl.int32) + BITS * num_words
        seen = _seen_nodes(words, num_words, bit + first_node, bit + at, every, used, row, chain, SPAN, BITS)
        scores = tl.where(seen, scores, float("-inf"))
        mixed, peak, total = _softmax_step(scores, value, mixed, peak, total, scale)
    for block in range(tl.maximum(low, cached_blocks), high):
        first_node = (block - cached_blocks) * BLOCK_N
        at = first_node + tl.arange(0, BLOCK_N)
        key = _load_rows(keys, cached + at, cached + before + nodes, depth, slot_stride, D)
        value = _load_rows(values, cached + at, cached + before + nodes, depth, slot_stride, D)
        scores = tl.dot(rows, tl.trans(key), input_precision="ieee")
        seen = _seen_nodes(words, num_words, first_node, at, before + node, used, row, chain, SPAN, BITS)
        if WINDOW > 0:
            at_place = tl.load(positions + segment_row + at, mask=at < before + nodes, other=0)
            seen = seen & (place[:, None] - at_place[None, :] < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        mixed, peak, total = _softmax_step(scores, value, mixed, peak, total, scale)

    out += first_row.to(tl.int64) * out_stride + head * (G * D)
    if SPLITS == 1 or used_ranges == 1:
        whole = out + node[:, None] * out_stride + column + depth[None, :]
        tl.store(whole, (mixed / total[:, None]).to(out.dtype.element_ty), mask=inside)
    else:
        program = tile * tl.num_programs(1) + head
        parts += program.to(tl.int64) * (SPLITS * BLOCK_M * (D + 2))
        part = parts + split * (BLOCK_M * (D + 2))
        tl.store(part + line[:, None] * D + depth[None, :], mixed, mask=inside)
        tl.store(part + BLOCK_M * D + line, peak, mask=used)
        tl.store(part + BLOCK_M * (D + 1) + line, total, mask=used)
        if LAST_MERGES:
            tl.debug_barrier()  # all warps have stored before the arrival is counted
            arrived = tl.atomic_add(arrivals + program, 1, sem="acq_rel")
            if arrived == used_ranges - 1:
                for first in range(0, nodes * G, MERGE_ROWS):
                    _merge(parts, out, out_stride, first, nodes * G, used_ranges,
                           D, BLOCK_D, G, BLOCK_M, SPLITS, MERGE_ROWS)  # fmt: skip
                tl.store(arrivals + program, 0)  # for the next launch


@triton.jit
def _merge_parts(
    tiles, positions, parts, out, out_stride,
    D: tl.constexpr, BLOCK_D: tl.constexpr, G: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MIN_BLOCKS: tl.constexpr, WINDOW: tl.constexpr, FIELDS: tl.constexpr,
    MERGE_ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge a few rows of one tile and key head, if more than one range is used."""
    tile, head = tl.program_id(0), tl.program_id(1)
    first = tl.program_id(2) * MERGE_ROWS
    fields = tiles + tile * FIELDS
    first_row = tl.load(fields)
    nodes = tl.load(fields + 1)
    prefix = tl.load(fields + 3)
    before = first_row - tl.load(fields + 4)
    first_block = _first_block(positions, first_row, nodes, prefix, WINDOW, BLOCK_M, BLOCK_S)
    earlier = tl.load(fields + 6)
    last_block = tl.cdiv(prefix, BLOCK_S) + tl.cdiv(earlier, BLOCK_N) + tl.cdiv(before + nodes, BLOCK_N)
    _, used_ranges = _ranges(first_block, last_block, SPLITS, MIN_BLOCKS)
    wait_for_input(PDL)
    if first < nodes * G and used_ranges > 1:
        program = tile * tl.num_programs(1) + head
        parts += program.to(tl.int64) * (SPLITS * BLOCK_M * (D + 2))
        out += first_row.to(tl.int64) * out_stride + head * (G * D)
        _merge(parts, out, out_stride, first, nodes * G, used_ranges, D, BLOCK_D, G, BLOCK_M, SPLITS, MERGE_ROWS)


def tree_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tiles: torch.Tensor,
    words: torch.Tensor | None,
    positions: torch.Tensor | None,
    out: torch.Tensor,
    parts: torch.Tensor | None,
    arrivals: torch.Tensor | None,
    *,
    config: AttentionConfig,
    window: int = 0,
    pdl: bool = False,
) -> None:
    """Launch the attention of one layer. Allocates nothing and does not wait.

    ``query [N, >= heads * D]`` (the queries are the first columns) attends over ``keys, values [kv_heads, slots, D]``,
    both with the same strides; the result goes to ``out [N, heads * D]``. ``tiles [T, TILE_FIELDS]``, ``words [N, W]``
    and ``positions [N]`` are int32, see ``write_plan``. ``words`` may be None if all segments are chains, ``positions``
    without a window, ``parts`` and ``arrivals`` (see ``scratch_size``) if ``splits`` is 1. Queries must be rotated, and
    the nodes' keys and values stored in their slots.
    """
    num_kv_heads, _, dim = keys.shape
    num_words = 0 if words is None else words.shape[1]
    shape = {
        "D": dim,
        "BLOCK_D": triton.next_power_of_2(dim),
        "G": config.group,
        "BLOCK_M": config.block_m,
        "BLOCK_S": config.block_s,
        "BLOCK_N": config.block_n,
        "SPLITS": config.splits,
        "MIN_BLOCKS": config.min_blocks,
        "WINDOW": window,
        "FIELDS": tiles.shape[1],
        "PDL": pdl,
        **launch_options(pdl),
    }
    last_merges = config.splits > 1 and config.merge == "last"
    _attend[(len(tiles), num_kv_heads, config.splits)](
        query, keys, values, tiles, words, num_words, positions, out, parts, arrivals,
        dim**-0.5 * math.log2(math.e), query.stride(0), out.stride(0), keys.stride(0), keys.stride(1),
        SPAN=min(num_words, max(1, config.block_n // WORD_BITS)), BITS=WORD_BITS,
        LAST_MERGES=last_merges, MERGE_ROWS=config.merge_rows(dim),
        num_warps=config.num_warps, num_stages=config.num_stages, **shape,
    )  # fmt: skip
    if config.splits > 1 and not last_merges:
        _merge_parts[(len(tiles), num_kv_heads, triton.cdiv(config.block_m, MERGE_ROWS))](
            tiles, positions, parts, out, out.stride(0), MERGE_ROWS=MERGE_ROWS, num_warps=MERGE_WARPS, **shape
        )
