"""The tilings that ``gpu_tilings.py`` tries."""

from __future__ import annotations

import itertools
from typing import NamedTuple

from draftwood.models.config import ModelConfig
from draftwood.targets.native.cuda.attention.plan import AttentionConfig
from draftwood.targets.native.cuda.products.launch import Gpu, Kind, Tiling

BLOCKS_OUT, BLOCKS_IN, WARPS = (16, 32, 64, 128), (64, 128), (4, 8)
LARGE = 4 << 20  # weights: too many narrow blocks above this
MAX_STAGES = 8
TILE_ROWS, KEYS, NODES, RANGES, ATTENTION_STAGES = (
    (16, 32, 64, 128),
    (32, 64, 128),
    (16, 32, 64),
    (2, 4, 8, 16),
    (2, 3, 4),
)
MAX_SCORES = 32  # per thread: more do not fit into registers
MIN_PROGRAMS = 0.45  # per processor: with fewer, too many processors are idle
MAX_SPLIT = 2  # programs per processor of a split-k product


class Dims(NamedTuple):
    """A product of a layer, as arguments of ``choose_tiling``."""

    num_in: int
    num_out: int
    kind: Kind


def layer_products(config: ModelConfig) -> dict[str, Dims]:
    width, inner = config.hidden_size, config.intermediate_size
    return {
        "qkv": Dims(width, config.q_size + 2 * config.kv_size, Kind.PLAIN),
        "o": Dims(config.q_size, width, Kind.PLAIN),
        "gate_up": Dims(width, inner, Kind.GATED),
        "down": Dims(inner, width, Kind.PLAIN),
    }


def stage_bytes(dims: Dims, block_out: int, block_in: int, rows: int) -> int:
    """Shared memory per stage, for 2-byte weights and rows. ``rows``: padded number."""
    matrices = 2 if dims.kind is Kind.GATED else 1
    return block_in * 2 * (block_out * matrices + rows)


def candidates(dims: Dims, rows: int, gpu: Gpu) -> list[Tiling]:
    """List valid tilings: even steps, stages fit into shared memory, processors are busy."""
    found = []
    for block_out, block_in in itertools.product(BLOCKS_OUT, BLOCKS_IN):
        uneven = dims.num_in % block_in or (dims.num_out % block_out and block_out > 32)
        if uneven or (dims.num_in * dims.num_out > LARGE and block_out < 32):
            continue
        steps, blocks = dims.num_in // block_in, -(-dims.num_out // block_out)
        stage = stage_bytes(dims, block_out, block_in, rows)
        for splits in range(1, steps // 2 + 1):
            programs = blocks * splits
            if steps % splits or programs < MIN_PROGRAMS * gpu.num_processors:
                continue
            if splits > 1 and programs > MAX_SPLIT * gpu.num_processors:
                continue
            for warps, sharing in itertools.product(WARPS, (1, 2, 3)):  # programs per processor
                stages = min(MAX_STAGES, gpu.shared_bytes // sharing // stage, steps // splits + 1)
                if stages >= 2 and (warps == WARPS[0] or block_out >= 64):
                    found.append(Tiling(block_out, block_in, splits, warps, stages))
    return list(dict.fromkeys(found))


def attention_candidates(config: ModelConfig, rows: int, gpu: Gpu) -> list[AttentionConfig]:
    """List valid attention tilings: stages fit into shared memory, scores into registers."""
    group, dim = config.num_heads // config.num_kv_heads, config.head_dim
    found = []
    for block_m, block_s, block_n in itertools.product(TILE_ROWS, KEYS, NODES):
        if block_m < group or block_m > max(TILE_ROWS[0], 2 * rows * group) or block_n > max(NODES[0], 2 * rows):
            continue
        for warps, stages in itertools.product(WARPS, ATTENTION_STAGES):
            shared = 2 * dim * (2 * stages * block_s + block_m)
            if shared > gpu.shared_bytes or block_m * max(block_s, block_n) > MAX_SCORES * 32 * warps:
                continue
            for splits, merge in itertools.product(RANGES, ("last", "kernel")):
                found.append(
                    AttentionConfig(
                        group=group,
                        block_m=block_m,
                        block_s=block_s,
                        block_n=block_n,
                        splits=splits,
                        min_blocks=1,
                        num_warps=warps,
                        num_stages=stages,
                        merge=merge,  # type: ignore[arg-type]
                    )
                )
    return found
