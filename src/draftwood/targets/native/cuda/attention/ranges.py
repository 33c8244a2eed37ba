"""How ordered attention divides keys and programs."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.targets.native.cuda.attention.plan import SPARE_BYTES, max_tiles, power_of_two

LOADED_VALUES = 4096  # float32 values of partial results that a program loads at a time
MAX_SPLITS = 32  # programs per tile and key head
MAX_PART_BYTES = 128 << 20  # memory for partial results; beyond, one program runs all ranges of a tile
BLOCK_S = 64  # keys per step: enough for the tensor cores, and three steps in flight fit twice on a processor


@dataclass(frozen=True, kw_only=True)
class OrderedConfig:
    """The tiling of a launch. A tile is ``block_m // group`` nodes of one segment, with one row per query head."""

    group: int  # query heads per key head
    block_m: int  # query rows of a tile
    block_s: int  # keys per step; the same for all launches of a model
    splits: int  # programs per tile and key head, which share its ranges
    num_parts: int  # partial results per tile and key head
    num_warps: int
    num_stages: int

    @property
    def nodes_per_tile(self) -> int:
        return self.block_m // self.group

    @staticmethod
    def loads(rows: int, head_dim: int) -> int:
        """Partial results of some rows that a program loads at a time."""
        return max(1, min(16, LOADED_VALUES // (rows * power_of_two(head_dim))))


def find_range(block: int) -> int:
    """The range that a block of keys is in.

    The first 32 ranges have 2 blocks each. From then on, every doubling of the context adds 16 ranges of equal size. So
    short contexts have enough ranges for many processors, and long ones not too many to merge.
    """
    power = max(block, 32).bit_length() - 1
    return 16 * (power - 5) + (block >> (power - 4))


def choose_block(head_dim: int, shared_bytes: int) -> int:
    """Keys per step. They determine the order of sums, so they depend on the model and the GPU alone."""
    dim = power_of_two(head_dim)
    return next(
        size for size in (BLOCK_S, BLOCK_S // 2, BLOCK_S // 4) if _shared_bytes(64, size, dim, 2) <= shared_bytes
    )


def choose_ordered_config(
    *,
    num_nodes: int,
    num_sequences: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_processors: int,
    shared_bytes: int,
    capacity: int,
) -> OrderedConfig:
    """Choose a tiling for ``num_nodes`` packed nodes of ``num_sequences`` sequences with up to ``capacity`` positions.

    With few nodes the bandwidth of keys is the limit: small tiles and many programs per tile. With many nodes tiles are
    large, so that few of them read the same keys. ``shared_bytes`` is what a program may use.
    """
    group, dim = num_heads // num_kv_heads, power_of_two(head_dim)
    rows = -(-num_nodes // num_sequences) * group  # of an average sequence
    block_m = next((size for size in (16, 32) if rows <= size), 64)
    block_s = choose_block(head_dim, shared_bytes)
    num_ranges = find_range(-(-capacity // block_s)) + 1
    programs = max_tiles(num_nodes, num_sequences, block_m // group) * num_kv_heads
    busy = num_processors * (4 if block_m == 16 else 1)
    splits = min(power_of_two(busy // programs + 1) // 2, MAX_SPLITS)  # rounded down
    if splits < 2 and num_sequences > 1 and programs < 4 * num_processors:
        splits = 2  # contexts differ in length
    if programs * num_ranges * block_m * (head_dim + 2) * 4 > MAX_PART_BYTES:
        splits = 1
    num_stages = 3 if _shared_bytes(block_m, block_s, dim, 3) <= shared_bytes // (2 if block_m == 16 else 1) else 2
    return OrderedConfig(
        group=group,
        block_m=block_m,
        block_s=block_s,
        splits=max(splits, 1),
        num_parts=2 if splits <= 1 else num_ranges,
        num_warps=8 if block_m * dim > 4096 and splits <= 1 else 4,
        num_stages=num_stages,
    )


def _shared_bytes(block_m: int, block_s: int, dim: int, num_stages: int) -> int:
    """Shared memory of a program: keys and values in flight, queries, attention weights."""
    return 2 * (2 * (num_stages - 1) * block_s * dim + block_m * (dim + block_s)) + SPARE_BYTES


def ordered_scratch_size(config: OrderedConfig, num_tiles: int, num_kv_heads: int, head_dim: int) -> tuple[int, int]:
    """Float32 values and int32 counters that a launch needs. The counters must be zero before the first one."""
    programs = num_tiles * num_kv_heads
    return programs * config.num_parts * config.block_m * (head_dim + 2), programs
