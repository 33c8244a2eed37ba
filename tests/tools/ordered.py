"""Launches of ordered attention, and what its kernels take on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftwood.targets.native.cuda.attention.plan import TILE_FIELDS, WORD_BITS
from draftwood.targets.native.cuda.attention.ranges import OrderedConfig, ordered_scratch_size
from draftwood.targets.native.decoder import PackedSegment
from tests.tools.attention import SPARE_ROWS, Case, Launch
from tests.tools.triton import Resources, resources


class OrderedLaunch(Launch):
    """As ``Launch``, with the paths of its rows; without words all segments are single nodes."""

    def __init__(self, case: Case, segments: list[PackedSegment], device: torch.device, seed: int = 0) -> None:
        super().__init__(case, segments, device, seed)
        afters = [segment.after for segment in segments for _ in range(segment.size)]
        self.afters = torch.tensor(afters, dtype=torch.int32, device=device)
        self.paths: torch.Tensor | None = None
        if case.num_words:
            shape = (self.num_rows, case.num_words * WORD_BITS)
            self.paths = torch.full(shape, 30_000, dtype=torch.int16, device=device)
        self.places = torch.tensor(self.positions, dtype=torch.int32, device=device)

    def scratch(self, num_tiles: int) -> tuple[int, int]:
        assert isinstance(self.case.config, OrderedConfig)
        return ordered_scratch_size(self.case.config, num_tiles, self.case.num_kv_heads, self.case.head_dim)

    def run(self, pdl: bool = False) -> torch.Tensor:
        from draftwood.targets.native.cuda.attention.ordered import ordered_attention
        from draftwood.targets.native.cuda.attention.paths import write_paths

        assert isinstance(self.case.config, OrderedConfig)
        assert self.places is not None
        assert self.parts is not None
        assert self.arrivals is not None
        if self.words is not None and self.paths is not None:
            write_paths(self.words, self.afters, self.paths)
        shape = (self.num_rows + SPARE_ROWS, self.width)
        out = torch.full(shape, float("nan"), device=self.query.device, dtype=self.case.dtype)
        ordered_attention(
            self.query, self.keys, self.values, self.tiles, self.paths, self.places, out, self.parts, self.arrivals,
            config=self.case.config, window=self.case.window, pdl=pdl,
        )  # fmt: skip
        return out

    def take(self, other: Launch, nodes: Sequence[int]) -> None:
        """Get the same queries, keys and values as ``other``, a launch of one tree.

        ``nodes`` are the nodes of that tree, numbered from its root, that the rows here stand for; negative numbers are
        its prefix, whose queries do not matter. Keys and values are those of the prefix, of earlier nodes and of these.
        """
        (theirs,), (mine,) = other.segments, self.segments
        kept = [node for node in nodes if node >= 0]
        self.query[len(nodes) - len(kept) :] = other.query[torch.tensor(kept) - theirs.after]
        first, count = theirs.base + theirs.prefix_len, mine.prefix_len + mine.after
        sources = [theirs.base + at for at in range(count)] + [first + node for node in nodes]
        for here, there in ((self.keys, other.keys), (self.values, other.values)):
            here[:, mine.base : mine.base + len(sources)] = there[:, sources]


def ordered_resources(
    config: OrderedConfig, head_dim: int, dtype: str, capability: int, *, second: bool = False
) -> Resources:
    """What the first or the second kernel takes on a GPU of this capability."""
    from draftwood.targets.native.cuda.attention import ordered

    rows = 1 << (config.group - 1).bit_length()
    constants: dict[str, Any] = {
        "D": head_dim,
        "BLOCK_D": 1 << (head_dim - 1).bit_length(),
        "G": config.group,
        "BLOCK_M": config.block_m,
        "BLOCK_S": config.block_s,
        "SPLITS": config.splits,
        "PARTS": config.num_parts,
        "WINDOW": 0,
        "FIELDS": TILE_FIELDS,
        "PDL": capability >= 90,
    }
    types = dict.fromkeys(("query", "keys", "values", "out"), f"*{dtype}")
    types |= dict.fromkeys(("query_stride", "out_stride", "head_stride", "slot_stride"), "i32")
    types |= {"tiles": "*i32", "positions": "*i32", "scale": "fp32", "parts": "*fp32"}
    if second:
        constants |= {"PATH": 160, "LOADS": config.loads(16, head_dim)}
        return resources(
            ordered._finish, types | {"paths": "*i16"}, constants,
            capability=capability, num_warps=ordered.NODE_WARPS, num_stages=3,
        )  # fmt: skip
    constants |= {"ROWS": rows, "LOADS": config.loads(rows, head_dim)}
    return resources(
        ordered._attend, types | {"arrivals": "*i32"}, constants,
        capability=capability, num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
