"""What the attention kernel is told about a packed batch: query tiles, ancestor bits, and how a launch is cut up.

Plain numpy: the arrays are filled on the host, into views of the buffers that one copy takes to the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from draftwood.errors import OptionError
from draftwood.targets.native.decoder import PackedSegment
from draftwood.tree import is_chain

Ints = npt.NDArray[np.int32]

# First packed row, nodes, base slot, prefix length, first packed row of the segment, is it a new chain, nodes of its
# tree that earlier passes have written.
TILE_FIELDS = 7
WORD_BITS = 32
LEAST_WORDS = 5  # of a row, in passes of few rows too: bits for 128 nodes of earlier passes, and one word for new ones
MOST_NODES = 2048  # of a tree: twice the largest budget
MERGE_REGISTERS = 8192  # float32 values of partial results that a merging program holds at a time
MERGE_IN_PLACE = 64 * 1024  # bytes of partial results that one program merges sooner than a second kernel starts
MOST_SPLITS = 16
BLOCK_N = 32  # nodes of a step: the last range of keys has no more to do than the others
SPARE_BYTES = 2048  # of shared memory, for sums across warps and what compilers align
BLOCK_S = 64  # keys of a step: enough for the tensor cores, and three steps under way fit twice on a processor


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """How one launch is cut up. A tile is ``block_m // group`` nodes of one segment, a row for each query head."""

    group: int  # query heads per key head
    block_m: int  # query rows of a tile
    block_s: int  # keys of a step through the prefix
    block_n: int  # nodes of a step through the tree, a power of two
    splits: int  # ranges at most that the keys of a tile are cut into, a power of two
    min_blocks: int  # steps of a range at least: short contexts use fewer ranges
    num_warps: int
    num_stages: int
    merge: Literal["last", "kernel"]  # the ranges are merged by the last of them to end, or by a second kernel

    @property
    def nodes_per_tile(self) -> int:
        return self.block_m // self.group

    def merge_rows(self, head_dim: int) -> int:
        """Query rows merged at a time, a power of two."""
        return max(1, min(self.block_m, MERGE_REGISTERS // (self.splits * _power_of_two(head_dim)), 8))


def choose(
    *,
    num_nodes: int,
    num_sequences: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_processors: int,
    shared_bytes: int,
) -> AttentionConfig:
    """A good cut for ``num_nodes`` packed nodes of ``num_sequences`` sequences, whatever their contexts.

    Few nodes leave the time to the keys' bandwidth: small tiles and many ranges, two programs to a processor. Many
    nodes want large tiles, so that the keys are read by few of them. ``shared_bytes`` are what a program may have.
    """
    group = num_heads // num_kv_heads
    rows = -(-num_nodes // num_sequences) * group  # of an average sequence
    block_m = next((size for size in (16, 32) if rows <= size), 64)
    programs = most_tiles(num_nodes, num_sequences, block_m // group) * num_kv_heads
    busy = num_processors * (2 if block_m == 16 else 1)
    splits = _power_of_two(busy // programs + 1) // 2  # rounded down
    least = 2 if num_sequences > 1 and programs < 4 * num_processors else 1  # contexts of several sequences differ
    splits = min(max(splits, least), MOST_SPLITS if block_m == 16 else MOST_SPLITS // 2)
    in_place = splits * min(rows, block_m) * head_dim * 4 <= MERGE_IN_PLACE
    block_s, num_stages = _steps(block_m, head_dim, shared_bytes)
    return AttentionConfig(
        group=group,
        block_m=block_m,
        block_s=block_s,
        block_n=16 if num_nodes <= 16 * num_sequences else BLOCK_N,
        splits=splits,
        min_blocks=1,
        num_warps=4,
        num_stages=num_stages,
        merge="last" if in_place else "kernel",
    )


def _steps(block_m: int, head_dim: int, shared_bytes: int) -> tuple[int, int]:
    """Keys of a step through the prefix, and steps under way at once: the best of those that fit."""
    dim = _power_of_two(head_dim)
    wished = [(BLOCK_S, 3)] if dim <= 128 else []
    if block_m == 16 and dim <= 128:
        wished.insert(0, (2 * BLOCK_S, 3))
    for block_s, num_stages in (*wished, (BLOCK_S, 2), (BLOCK_S // 2, 2)):
        held = 2 * (num_stages - 1) * block_s * dim  # keys and values
        if 2 * (held + block_m * (dim + block_s)) + SPARE_BYTES <= shared_bytes:  # beside queries and weights
            return block_s, num_stages
    return BLOCK_S // 4, 2


def most_tiles(num_nodes: int, num_sequences: int, nodes_per_tile: int) -> int:
    """Tiles that ``num_nodes`` nodes of ``num_sequences`` sequences need at most, however they are spread."""
    return num_sequences + (num_nodes - num_sequences) // nodes_per_tile


def scratch_size(config: AttentionConfig, num_tiles: int, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Float32 values and int32 counters that a launch needs. The counters must be zero before the first one."""
    if config.splits == 1:
        return 0, 0
    programs = num_tiles * num_kv_heads
    return programs * config.splits * config.block_m * (head_dim + 2), programs


def words_per_row(num_rows: int) -> int:
    """Ancestor words that the rows of a pass have, if they are so many. Larger passes are of prompts, which need none:
    there is no tree of more nodes."""
    return max(LEAST_WORDS, -(-min(num_rows, MOST_NODES) // WORD_BITS))


def bits_needed(segment: PackedSegment) -> int:
    """Bits of a row of the segment, if it is no new chain: nodes of earlier passes have words of their own."""
    return segment.size + -(-segment.after // WORD_BITS) * WORD_BITS


def write_plan(
    tiles: Ints, words: Ints | None, segments: Sequence[PackedSegment], nodes_per_tile: int, window: int = 0
) -> None:
    """Fills ``tiles [T, TILE_FIELDS]`` and the rows of the segments in ``words [N, W]``.

    Tiles behind the last one in use have no nodes. Bit j of word w of a row says that node 32*w + j of its segment is
    visible, that is, an ancestor in the window (0: of any length). Nodes of earlier passes have the last words, as many
    as they need. Rows of new chains need no words and have zeros.
    """
    chains = [segment.after == 0 and is_chain(segment.parents) for segment in segments]
    rows = _tiles(segments, chains, nodes_per_tile)
    if len(rows) > len(tiles):
        raise OptionError("the packed batch has more tiles than there is room for", got=len(rows), allowed=len(tiles))
    tiles[: len(rows)] = rows
    tiles[len(rows) :] = 0
    if words is not None:
        packed = np.frombuffer(_ancestor_bits(segments, chains, words.shape[1] * 4, window), dtype="<i4")
        words[: len(packed) // words.shape[1]] = packed.reshape(-1, words.shape[1])


def _tiles(segments: Sequence[PackedSegment], chains: list[bool], nodes_per_tile: int) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    for segment, chain in zip(segments, chains, strict=True):
        start, base, prefix_len, _, _, after = segment
        end = segment.rows.stop
        for first in range(start, end, nodes_per_tile):
            nodes = min(nodes_per_tile, end - first)
            rows.append((first, nodes, base, prefix_len, start, chain, after))
    return rows


def _ancestor_bits(segments: Sequence[PackedSegment], chains: list[bool], num_bytes: int, window: int) -> bytes:
    """The words of all rows: of each node one long number, its parent's with one bit more."""
    packed: list[bytes] = []
    for segment, chain in zip(segments, chains, strict=True):
        if chain:
            packed.append(bytes(segment.size * num_bytes))
            continue
        if bits_needed(segment) > 8 * num_bytes:
            got, most = len(segment.parents), f"at most {8 * num_bytes}"
            raise OptionError("a tree has more nodes than its ancestor words have bits", got=got, allowed=most)
        seen: list[int] = []
        for node, parent in enumerate(segment.parents):
            bits = 1 << node | (seen[parent] if parent >= 0 else 0)
            if window and bits.bit_count() > window:
                bits &= bits - 1  # the oldest one leaves the window
            seen.append(bits)
        after, first_bit = segment.after, 8 * num_bytes - (bits_needed(segment) - segment.size)
        placed = [bits >> after | (bits & ((1 << after) - 1)) << first_bit for bits in seen[after:]]
        packed.extend([bits.to_bytes(num_bytes, "little") for bits in placed])
    return b"".join(packed)


def _power_of_two(number: int) -> int:
    """The smallest one that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()
