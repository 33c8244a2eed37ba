"""Random packed batches for the attention kernel, the float64 answer, and what the kernel takes on a GPU.

``python -m tests.attention_tools`` compiles the kernel for two generations of GPUs and prints a table.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from draftwood.target.base import chain_parents, depths_of
from draftwood.target.native.cuda.attention_plan import (
    TILE_FIELDS,
    WORD_BITS,
    AttentionConfig,
    choose,
    most_tiles,
    scratch_size,
    write_plan,
)
from draftwood.target.native.decoder import PackedSegment
from draftwood.tree.layout import ancestor_mask

from .conftest import random_parents
from .triton_tools import Resources, resources

SPARE_ROWS = 3  # behind the last packed row: nobody may write there


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one launch is compiled for."""

    config: AttentionConfig
    num_kv_heads: int = 1
    head_dim: int = 64
    dtype: torch.dtype = torch.float16
    window: int = 0
    num_words: int = 3


def random_segments(rng: random.Random, sizes: list[tuple[int, int]], chains: bool = False) -> list[PackedSegment]:
    """Segments of ``(prefix, nodes)`` with gaps between their slots; trees, some of them chains, or only chains."""
    segments: list[PackedSegment] = []
    start = 0
    base = rng.randrange(5)
    for prefix, size in sizes:
        parents = chain_parents(size) if chains else random_parents(rng, size)
        segments.append(PackedSegment(start, base, prefix, parents, 1))
        start += size
        base += prefix + size + rng.randrange(20)
    return segments


class Launch:
    """The tensors of a launch: NaN wherever nothing may be read, and wherever something must be written."""

    def __init__(self, case: Case, segments: list[PackedSegment], device: torch.device, seed: int = 0) -> None:
        config = case.config
        self.case, self.segments = case, segments
        self.num_rows = segments[-1].start + len(segments[-1].parents)
        self.width = case.num_kv_heads * config.group * case.head_dim
        generator = torch.Generator().manual_seed(seed)
        slots = max(segment.base + segment.prefix_len + len(segment.parents) for segment in segments)
        shape = (case.num_kv_heads, slots, case.head_dim)
        unused = torch.ones(slots, dtype=torch.bool)
        for segment in segments:
            unused[segment.base : segment.base + segment.prefix_len + len(segment.parents)] = False
        keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
        keys[:, unused] = values[:, unused] = float("nan")
        query = 3 * torch.randn(
            self.num_rows, self.width + 2 * case.head_dim, generator=generator
        )  # one key stands out
        self.query, self.keys, self.values = (x.to(device, case.dtype) for x in (query, keys, values))

        num_tiles = most_tiles(self.num_rows, len(segments), config.nodes_per_tile) + 1
        tiles = np.full((num_tiles, TILE_FIELDS), 7, dtype=np.int32)
        words = np.full((self.num_rows, case.num_words), -1, dtype=np.int32)
        write_plan(tiles, words if case.num_words else None, segments, config.nodes_per_tile)
        self.positions = [s.prefix_len + depth for s in segments for depth in depths_of(s.parents)]
        num_floats, num_counters = scratch_size(config, num_tiles, case.num_kv_heads, case.head_dim)
        self.tiles = torch.from_numpy(tiles).to(device)
        self.words = torch.from_numpy(words).to(device) if case.num_words else None
        self.places = torch.tensor(self.positions, dtype=torch.int32, device=device) if case.window else None
        self.parts = torch.full((num_floats,), float("nan"), device=device) if num_floats else None
        self.arrivals = torch.zeros(num_counters, dtype=torch.int32, device=device) if num_counters else None

    def run(self, pdl: bool = False) -> torch.Tensor:
        """``[N + SPARE_ROWS, heads * D]``."""
        from draftwood.target.native.cuda.attention import tree_attention

        out = torch.full(
            (self.num_rows + SPARE_ROWS, self.width), float("nan"), device=self.query.device, dtype=self.case.dtype
        )
        tree_attention(
            self.query, self.keys, self.values, self.tiles, self.words, self.places, out, self.parts, self.arrivals,
            config=self.case.config, window=self.case.window, pdl=pdl,
        )  # fmt: skip
        return out

    def expected(self) -> torch.Tensor:
        """``[N, heads * D]`` in float64."""
        return torch.cat([self._expected(segment) for segment in self.segments])

    def _expected(self, segment: PackedSegment) -> torch.Tensor:
        size, prefix, dim = len(segment.parents), segment.prefix_len, self.case.head_dim
        rows = slice(segment.start, segment.start + size)
        visible = torch.ones(size, prefix + size, dtype=torch.bool)
        visible[:, prefix:] = torch.from_numpy(ancestor_mask(segment.parents))
        if self.case.window:
            own = torch.tensor(self.positions[rows])
            visible &= own[:, None] - torch.cat([torch.arange(prefix), own])[None, :] < self.case.window
        slots = slice(segment.base, segment.base + prefix + size)
        query = self.query[rows, : self.width].double().view(size, self.case.num_kv_heads, -1, dim)
        scores = torch.einsum("nhgd,hsd->hgns", query, self.keys[:, slots].double()) * dim**-0.5
        weights = scores.masked_fill(~visible.to(scores.device), float("-inf")).softmax(dim=-1)
        return torch.einsum("hgns,hsd->nhgd", weights, self.values[:, slots].double()).reshape(size, self.width)


def attention_resources(
    config: AttentionConfig, head_dim: int, dtype: str, num_words: int, capability: int
) -> Resources:
    """What the main kernel takes on a GPU of this capability."""
    from draftwood.target.native.cuda import attention

    constants: dict[str, Any] = {
        "D": head_dim,
        "BLOCK_D": 1 << (head_dim - 1).bit_length(),
        "G": config.group,
        "BLOCK_M": config.block_m,
        "BLOCK_S": config.block_s,
        "SPLITS": config.splits,
        "MIN_BLOCKS": config.min_blocks,
        "W": num_words,
        "SPAN": min(num_words, config.block_s // WORD_BITS + 1),
        "BITS": WORD_BITS,
        "WINDOW": 0,
        "FIELDS": TILE_FIELDS,
        "LAST_MERGES": config.splits > 1 and config.merge == "last",
        "MERGE_ROWS": config.merge_rows(head_dim),
        "PDL": capability >= 90,
    }
    types = dict.fromkeys(("query", "keys", "values", "out"), f"*{dtype}")
    types |= dict.fromkeys(("query_stride", "out_stride", "head_stride", "slot_stride"), "i32")
    types |= {"tiles": "*i32", "scale": "fp32"}
    optional = {"words": ("*i32", num_words), "positions": ("*i32", 0)}
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
BATCHES = ((1, 1), (4, 1), (8, 1), (16, 1), (64, 1), (128, 1), (256, 32), (512, 1), (2048, 4))  # nodes, sequences


def main() -> None:
    seen = set()
    for model, (heads, kv_heads, dim) in MODELS.items():
        for nodes, sequences in BATCHES:
            config = choose(
                num_nodes=nodes, num_sequences=sequences, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim,
                num_processors=132,
            )  # fmt: skip
            print(f"{model:8} {nodes:5} nodes of {sequences:2}  {config}")  # noqa: T201
            for capability in (90, 80):
                if (model, config, capability) not in seen:
                    seen.add((model, config, capability))
                    found = attention_resources(config, dim, "bf16", 2 if nodes < 512 else 0, capability)
                    print(f"    sm_{capability} {found}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
