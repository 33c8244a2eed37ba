"""The inputs of the attention kernel for a packed batch: query tiles, ancestor bits, and the tiling of a launch.

Plain numpy: the arrays are filled on the host, in views of the buffer that is copied to the GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from draftwood.errors import OptionError
from draftwood.targets.native.decoder import PackedSegment
from draftwood.tree import is_chain

Ints = npt.NDArray[np.int32]

# First packed row, number of nodes, base slot, prefix length, first packed row of the segment, whether the segment is a
# new chain, nodes of its tree written by earlier passes.
TILE_FIELDS = 7
WORD_BITS = 32
MIN_WORDS = 5  # ancestor words of a row in small passes: bits for 128 nodes of earlier passes, one word for new nodes
MAX_NODES = 2048  # of a tree: twice the largest budget
MERGE_REGISTERS = 8192  # float32 values of partial results that a merging program holds at a time
MERGE_IN_PLACE = 48 * 1024  # bytes of partial results that one program merges faster than a second kernel starts
MAX_SPLITS = 16
BLOCK_N = 32  # nodes per step: small, so that the last range of keys takes no longer than the others
SPARE_BYTES = 2048  # shared memory left for sums across warps and alignment
BLOCK_S = 64  # keys per step: enough for the tensor cores, and three steps in flight fit twice on a processor
LONG_RANGE = 8  # steps: merging ranges takes so long that shorter ones do not pay on a busy GPU


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """The tiling of a launch. A tile is ``block_m // group`` nodes of one segment, with one row per query head."""

    group: int  # query heads per key head
    block_m: int  # query rows of a tile
    block_s: int  # keys per step through the prefix
    block_n: int  # nodes per step through the tree, a power of two
    splits: int  # maximum number of ranges that the keys of a tile are split into, a power of two
    min_blocks: int  # minimum number of steps of a range: short contexts use fewer ranges
    num_warps: int
    num_stages: int
    merge: Literal["last", "kernel"]  # ranges are merged by the last of them to finish, or by a second kernel

    @property
    def nodes_per_tile(self) -> int:
        return self.block_m // self.group

    def merge_rows(self, head_dim: int) -> int:
        """Query rows merged at a time, a power of two."""
        return max(1, min(self.block_m, MERGE_REGISTERS // (self.splits * power_of_two(head_dim)), 8))


def choose_config(
    *,
    num_nodes: int,
    num_sequences: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_processors: int,
    shared_bytes: int,
) -> AttentionConfig:
    """Choose a tiling for ``num_nodes`` packed nodes of ``num_sequences`` sequences with contexts of any length.

    With few nodes the bandwidth of keys is the limit: small tiles and many ranges, two programs per processor. With
    many nodes tiles are large, so that few of them read the same keys. ``shared_bytes`` is what a program may use.
    """
    group = num_heads // num_kv_heads
    rows = -(-num_nodes // num_sequences) * group  # of an average sequence
    small = (16, 32) if num_sequences == 1 else (16,)  # on a busy GPU large tiles are faster, even half empty
    block_m = next((size for size in small if rows <= size), 64)
    programs = max_tiles(num_nodes, num_sequences, block_m // group) * num_kv_heads
    busy = num_processors * (2 if block_m == 16 else 1)
    splits = power_of_two(busy // programs + 1) // 2  # rounded down
    min_splits = 2 if num_sequences > 1 and programs < 4 * num_processors else 1  # contexts differ in length
    splits = min(max(splits, min_splits), MAX_SPLITS if block_m == 16 else MAX_SPLITS // 2)
    is_busy = programs >= num_processors * (1 if block_m == 64 else 2) // 3
    in_place = is_busy or splits * min(rows, block_m) * head_dim * 4 <= MERGE_IN_PLACE  # if busy, few are merged
    is_crowded = programs * splits > num_processors  # several programs share a processor, and its memory
    block_s, num_stages = _choose_steps(block_m, head_dim, shared_bytes, is_crowded=is_crowded)
    return AttentionConfig(
        group=group,
        block_m=block_m,
        block_s=block_s,
        block_n=16 if num_nodes <= 16 * num_sequences else BLOCK_N,
        splits=splits,
        min_blocks=LONG_RANGE if is_busy else 1,
        num_warps=4,
        num_stages=num_stages,
        merge="last" if in_place else "kernel",
    )


def _choose_steps(block_m: int, head_dim: int, shared_bytes: int, *, is_crowded: bool) -> tuple[int, int]:
    """Keys per step through the prefix, and stages: the best pair that fits into shared memory."""
    dim = power_of_two(head_dim)
    preferred = [(BLOCK_S, 3)] if dim <= 128 else []
    if block_m == 16 and dim <= 128 and not is_crowded:
        preferred.insert(0, (2 * BLOCK_S, 3))
    for block_s, num_stages in (*preferred, (BLOCK_S, 2), (BLOCK_S // 2, 2)):
        held = 2 * (num_stages - 1) * block_s * dim  # keys and values
        if 2 * (held + block_m * (dim + block_s)) + SPARE_BYTES <= shared_bytes:  # with queries and attention weights
            return block_s, num_stages
    return BLOCK_S // 4, 2


def max_tiles(num_nodes: int, num_sequences: int, nodes_per_tile: int) -> int:
    """Maximum number of tiles for ``num_nodes`` nodes of ``num_sequences`` sequences, however they are distributed."""
    return num_sequences + (num_nodes - num_sequences) // nodes_per_tile


def scratch_size(config: AttentionConfig, num_tiles: int, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Float32 values and int32 counters that a launch needs. The counters must be zero before the first one."""
    if config.splits == 1:
        return 0, 0
    programs = num_tiles * num_kv_heads
    return programs * config.splits * config.block_m * (head_dim + 2), programs


def words_per_row(num_rows: int) -> int:
    """Ancestor words per row of a pass with ``num_rows`` rows.

    No tree exceeds MAX_NODES: larger passes run prompts, whose rows need no words.
    """
    return max(MIN_WORDS, -(-min(num_rows, MAX_NODES) // WORD_BITS))


def count_bits(segment: PackedSegment) -> int:
    """Ancestor bits per row of the segment, unless it is a new chain. Nodes of earlier passes use separate words."""
    return segment.size + -(-segment.after // WORD_BITS) * WORD_BITS


def write_plan(
    tiles: Ints, words: Ints | None, segments: Sequence[PackedSegment], nodes_per_tile: int, window: int = 0
) -> None:
    """Fill ``tiles [T, TILE_FIELDS]`` and the segments' rows of ``words [N, W]``.

    Unused tiles have no nodes. Bit j of word w of a row is set if node 32*w + j of its segment is visible: the node
    itself, or an ancestor inside the window (0: unlimited). Nodes of earlier passes use the last words, as many as they
    need. Rows of new chains need no words and have zeros.
    """
    chains = [segment.after == 0 and is_chain(segment.parents) for segment in segments]
    rows = _list_tiles(segments, chains, nodes_per_tile)
    if len(rows) > len(tiles):
        raise OptionError("The packed batch has too many tiles", got=len(rows), allowed=f"at most {len(tiles)}")
    tiles[: len(rows)] = rows
    tiles[len(rows) :] = 0
    if words is not None:
        packed = np.frombuffer(_pack_ancestors(segments, chains, words.shape[1] * 4, window), dtype="<i4")
        words[: len(packed) // words.shape[1]] = packed.reshape(-1, words.shape[1])


def _list_tiles(segments: Sequence[PackedSegment], chains: list[bool], nodes_per_tile: int) -> list[tuple[int, ...]]:
    rows: list[tuple[int, ...]] = []
    for segment, chain in zip(segments, chains, strict=True):
        start, base, prefix_len, _, _, after = segment
        end = segment.rows.stop
        for first in range(start, end, nodes_per_tile):
            nodes = min(nodes_per_tile, end - first)
            rows.append((first, nodes, base, prefix_len, start, chain, after))
    return rows


def _pack_ancestors(segments: Sequence[PackedSegment], chains: list[bool], num_bytes: int, window: int) -> bytes:
    """The words of all rows. The bits of a node are one long integer: its parent's bits, and its own."""
    packed: list[bytes] = []
    for segment, chain in zip(segments, chains, strict=True):
        if chain:
            packed.append(bytes(segment.size * num_bytes))
            continue
        if count_bits(segment) > 8 * num_bytes:
            got, allowed = len(segment.parents), f"at most {8 * num_bytes}"
            raise OptionError("A tree has more nodes than its ancestor words have bits", got=got, allowed=allowed)
        seen: list[int] = []
        for node, parent in enumerate(segment.parents):
            bits = 1 << node | (seen[parent] if parent >= 0 else 0)
            if window and bits.bit_count() > window:
                bits &= bits - 1  # the oldest ancestor leaves the window
            seen.append(bits)
        after, first_bit = segment.after, 8 * num_bytes - (count_bits(segment) - segment.size)
        placed = [bits >> after | (bits & ((1 << after) - 1)) << first_bit for bits in seen[after:]]
        packed.extend([bits.to_bytes(num_bytes, "little") for bits in placed])
    return b"".join(packed)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()
