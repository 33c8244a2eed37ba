"""Random packed batches for the attention kernel, the float64 reference, and the resources of the kernel on a GPU.

``python -m tests.tools.attention`` compiles the kernel for two generations of GPUs and prints a table.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from draftwood.targets.base import chain_parents, depths_of
from draftwood.targets.native.cuda.attention.plan import (
    TILE_FIELDS,
    WORD_BITS,
    AttentionConfig,
    choose_config,
    count_bits,
    max_tiles,
    scratch_size,
    write_plan,
)
from draftwood.targets.native.cuda.attention.ranges import OrderedConfig
from draftwood.targets.native.decoder import PackedSegment
from draftwood.tree.layout import ancestor_mask, is_chain
from tests.conftest import random_parents
from tests.tools.triton import Resources, resources

SPARE_ROWS = 3  # after the last packed row: must not be written


@dataclass(frozen=True, kw_only=True)
class Case:
    """The compile-time parameters of a launch."""

    config: AttentionConfig | OrderedConfig
    num_kv_heads: int = 1
    head_dim: int = 64
    dtype: torch.dtype = torch.float16
    window: int = 0
    num_words: int = 3  # per row


def random_segments(
    rng: random.Random, sizes: list[tuple[int, int]], chains: bool = False, most_earlier: int = 0
) -> list[PackedSegment]:
    """Segments of ``(prefix, nodes)`` with gaps between their slots: trees and chains, or only chains.

    Each tree has up to ``most_earlier`` more nodes from earlier passes.
    """
    segments: list[PackedSegment] = []
    start = 0
    base = rng.randrange(5)
    for prefix, size in sizes:
        after = rng.randint(0, most_earlier)
        parents = chain_parents(size) if chains else random_parents(rng, after + size)
        segments.append(PackedSegment(start, base, prefix, parents, 1, after))
        start += size
        base += prefix + after + size + rng.randrange(20)
    return segments


def words_needed(segments: Sequence[PackedSegment]) -> int:
    """Ancestor words of a row: none for chains, whose nodes attend to all earlier ones."""
    trees = [count_bits(segment) for segment in segments if segment.after or not is_chain(segment.parents)]
    return -(-max(trees, default=0) // WORD_BITS)


class Launch:
    """The tensors of a launch: NaN wherever nothing may be read, and wherever something must be written."""

    def __init__(self, case: Case, segments: list[PackedSegment], device: torch.device, seed: int = 0) -> None:
        config = case.config
        self.case, self.segments = case, segments
        self.num_rows = segments[-1].rows.stop
        self.width = case.num_kv_heads * config.group * case.head_dim
        generator = torch.Generator().manual_seed(seed)
        slots = max(segment.base + segment.prefix_len + len(segment.parents) for segment in segments)
        shape = (case.num_kv_heads, slots, case.head_dim)
        unused = torch.ones(slots, dtype=torch.bool)
        for segment in segments:
            unused[segment.base : segment.base + segment.prefix_len + len(segment.parents)] = False
        keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
        keys[:, unused] = values[:, unused] = float("nan")
        columns = self.width + 2 * case.num_kv_heads * case.head_dim  # output of the projection: queries come first
        query = 3 * torch.randn(self.num_rows, columns, generator=generator)  # one key stands out
        self.query, self.keys, self.values = (x.to(device, case.dtype) for x in (query, keys, values))

        num_tiles = max_tiles(self.num_rows, len(segments), config.nodes_per_tile) + 1
        tiles = np.full((num_tiles, TILE_FIELDS), 7, dtype=np.int32)
        words = np.full((self.num_rows, case.num_words), -1, dtype=np.int32)
        write_plan(tiles, words if case.num_words else None, segments, config.nodes_per_tile, case.window)
        self.positions = [s.prefix_len + depth for s in segments for depth in depths_of(s.parents)[s.after :]]
        num_floats, num_counters = self.scratch(num_tiles)
        self.tiles = torch.from_numpy(tiles).to(device)
        self.words = torch.from_numpy(words).to(device) if case.num_words else None
        self.places = torch.tensor(self.positions, dtype=torch.int32, device=device)
        if not case.window:
            self.places = None
        self.parts = torch.full((num_floats,), float("nan"), device=device) if num_floats else None
        self.arrivals = torch.zeros(num_counters, dtype=torch.int32, device=device) if num_counters else None

    def scratch(self, num_tiles: int) -> tuple[int, int]:
        """Float32 values and counters that it needs."""
        assert isinstance(self.case.config, AttentionConfig)
        return scratch_size(self.case.config, num_tiles, self.case.num_kv_heads, self.case.head_dim)

    def run(self, pdl: bool = False) -> torch.Tensor:
        """``[N + SPARE_ROWS, heads * D]``."""
        from draftwood.targets.native.cuda.attention.kernel import tree_attention

        out = torch.full(
            (self.num_rows + SPARE_ROWS, self.width), float("nan"), device=self.query.device, dtype=self.case.dtype
        )
        assert isinstance(self.case.config, AttentionConfig)
        tree_attention(
            self.query, self.keys, self.values, self.tiles, self.words, self.places, out, self.parts, self.arrivals,
            config=self.case.config, window=self.case.window, pdl=pdl,
        )  # fmt: skip
        return out

    def expected(self) -> torch.Tensor:
        """``[N, heads * D]`` in float64, from keys and values in the cache."""
        query = self.query[:, : self.width].double()
        return torch.cat([self._expected(segment, query) for segment in self.segments])

    def _expected(self, segment: PackedSegment, query: torch.Tensor) -> torch.Tensor:
        size, prefix, dim = segment.size, segment.prefix_len, self.case.head_dim
        rows, num_keys = segment.rows, prefix + len(segment.parents)
        visible = torch.ones(size, num_keys, dtype=torch.bool)
        visible[:, prefix:] = torch.from_numpy(ancestor_mask(segment.parents))[segment.after :]
        if self.case.window:
            nodes = prefix + torch.tensor(depths_of(segment.parents))
            places = torch.cat([torch.arange(prefix), nodes])
            visible &= nodes[segment.after :, None] - places[None, :] < self.case.window
        slots = slice(segment.base, segment.base + num_keys)
        grouped = query[rows].view(size, self.case.num_kv_heads, -1, dim)
        scores = torch.einsum("nhgd,hsd->hgns", grouped, self.keys[:, slots].double()) * dim**-0.5
        weights = scores.masked_fill(~visible.to(scores.device), float("-inf")).softmax(dim=-1)
        return torch.einsum("hgns,hsd->nhgd", weights, self.values[:, slots].double()).reshape(size, self.width)


def attention_resources(
    config: AttentionConfig, head_dim: int, dtype: str, num_words: int, capability: int
) -> Resources:
    """Resources of the main kernel on a GPU of this capability."""
    from draftwood.targets.native.cuda.attention import kernel as attention

    constants: dict[str, Any] = {
        "D": head_dim,
        "BLOCK_D": 1 << (head_dim - 1).bit_length(),
        "G": config.group,
        "BLOCK_M": config.block_m,
        "BLOCK_S": config.block_s,
        "BLOCK_N": config.block_n,
        "SPLITS": config.splits,
        "MIN_BLOCKS": config.min_blocks,
        "SPAN": min(num_words, max(1, config.block_n // WORD_BITS)),
        "BITS": WORD_BITS,
        "WINDOW": 0,
        "FIELDS": TILE_FIELDS,
        "LAST_MERGES": config.splits > 1 and config.merge == "last",
        "MERGE_ROWS": config.merge_rows(head_dim),
        "PDL": capability >= 90,
    }
    types = dict.fromkeys(("query", "keys", "values", "out"), f"*{dtype}")
    types |= dict.fromkeys(("query_stride", "out_stride", "head_stride", "slot_stride", "num_words"), "i32")
    types |= {"tiles": "*i32", "positions": "*i32", "scale": "fp32"}
    optional = {"words": ("*i32", num_words)}
    optional |= {"parts": ("*fp32", config.splits - 1), "arrivals": ("*i32", config.splits - 1)}
    for name, (kind, there) in optional.items():
        if there:
            types[name] = kind
        else:
            constants[name] = None
    return resources(
        attention._attend, types, constants,
        capability=capability, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip


MODELS = {
    "8B": (32, 8, 128),
    "1.5B": (12, 2, 128),
    "135M": (9, 3, 64),
    "head 96": (32, 32, 96),
    "head 256": (8, 4, 256),
}
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes, by capability
BATCHES = ((1, 1), (4, 1), (8, 1), (16, 1), (64, 1), (128, 1), (256, 32), (512, 1), (2048, 4))  # nodes, sequences


def main() -> None:
    seen = set()
    for model, (heads, kv_heads, dim) in MODELS.items():
        for nodes, sequences in BATCHES:
            config = choose_config(
                num_nodes=nodes, num_sequences=sequences, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
                num_processors=132, shared_bytes=SHARED[90],
            )  # fmt: skip
            print(f"{model:8} {nodes:5} nodes of {sequences:2}  {config}")  # noqa: T201
            for capability in (90, 80):
                if (model, config, capability) not in seen:
                    seen.add((model, config, capability))
                    found = attention_resources(config, dim, "bf16", 2 if nodes < 512 else 0, capability)
                    print(f"    sm_{capability} {found}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
