"""The cache of the transformers target: our own slots, behind the cache interface that models expect.

Nothing here derives from transformers' cache classes, whose internals change between releases. A model only calls
``update`` and reads lengths; ``CacheView`` implements that for one forward. A model that needs more of its cache (a
recurrent state, an index) fails on the view, and the probe at construction reports that the model is not supported.

Every layer keeps the keys and values of all positions, sliding-window layers too: the mask applies the window.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from draftwood.targets.base import Segment, depths_of
from draftwood.targets.slots import SlotBook
from draftwood.tree import ancestor_mask

_INITIAL_ROWS = 256  # of a layer; doubled when they are full


class SlotCache(SlotBook):
    """Keys and values of each layer, ``[1, heads, slots, dim]``, which grow as slots are used.

    Allocated when a layer first writes, so shapes may differ between layers and between keys and values.
    """

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.rows: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # layer -> keys, values

    @property
    def bytes_per_token(self) -> int:
        return sum(rows.shape[1] * rows.shape[3] * rows.element_size() for pair in self.rows.values() for rows in pair)

    def write(self, layer: int, new: tuple[torch.Tensor, torch.Tensor], where: slice | torch.Tensor, stop: int) -> None:
        """Write keys and values ``[1, heads, n, dim]`` to their slots, all of which are below ``stop``."""
        for rows, states in zip(self._grow_rows(layer, new, stop), new, strict=True):
            rows[:, :, where] = states

    def _grow_rows(self, layer: int, like: tuple[torch.Tensor, ...], stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.rows.get(layer)
        if rows is None or rows[0].shape[2] < stop:
            size = _INITIAL_ROWS if rows is None else 2 * rows[0].shape[2]
            size = max(stop, min(size, self.num_slots))
            keys, values = (states.new_empty(1, states.shape[1], size, states.shape[3]) for states in like)
            if rows is not None:
                keys[:, :, : rows[0].shape[2]] = rows[0]
                values[:, :, : rows[1].shape[2]] = rows[1]
            self.rows[layer] = rows = (keys, values)
        return rows

    def move_rows(self, sources: list[int], first: int) -> None:
        stop = first + len(sources)
        for layer, pair in self.rows.items():
            for rows in self._grow_rows(layer, pair, stop):
                # Indexing with a tensor copies, so sources and targets may overlap.
                rows[:, :, first:stop] = rows[:, :, torch.tensor(sources, device=rows.device)]


class PackedRow(NamedTuple):
    """The segments of one forward side by side: N nodes attend over K cached positions (prefixes and nodes)."""

    token_ids: list[int]  # [N]
    positions: npt.NDArray[np.int64]  # [N]
    key_positions: npt.NDArray[np.int64]  # [K]
    visible: npt.NDArray[np.bool_]  # [N, K] own prefix, ancestors and self
    wanted: list[int]  # [R] the nodes whose logits are wanted
    node_slots: list[int]  # [N] where the nodes' keys and values are written
    key_slots: list[int]  # [K]


def pack(segments: Sequence[Segment], cache: SlotCache) -> PackedRow:
    """Pack the segments side by side and reserve their slots: each sequence's tree directly follows its prefix."""
    token_ids: list[int] = []
    wanted: list[int] = []
    node_slots: list[int] = []
    key_slots: list[int] = []
    positions: list[int] = []
    key_positions: list[int] = []
    blocks: list[npt.NDArray[np.bool_]] = []
    for segment in segments:
        size, after = len(segment.token_ids), segment.after
        extent = cache.reserve(segment.sequence, segment.parents, after)
        tree_positions = [extent.length + depth for depth in depths_of(extent.parents)]
        wanted.extend(range(len(token_ids) + size - segment.num_logits, len(token_ids) + size))
        token_ids.extend(segment.token_ids)
        positions.extend(tree_positions[after:])
        first_node = extent.base + extent.length + after
        node_slots.extend(range(first_node, first_node + size))
        key_slots.extend(range(extent.base, first_node + size))
        key_positions.extend([*range(extent.length), *tree_positions])
        own_mask = ancestor_mask(extent.parents)[after:]  # [n, after + n]
        blocks.append(np.pad(own_mask, ((0, 0), (extent.length, 0)), constant_values=True))
    return PackedRow(
        token_ids,
        np.array(positions, dtype=np.int64),
        np.array(key_positions, dtype=np.int64),
        _block_diagonal(blocks),
        wanted,
        node_slots,
        key_slots,
    )


def _block_diagonal(blocks: list[npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
    if len(blocks) == 1:
        return blocks[0]
    whole = np.zeros((sum(b.shape[0] for b in blocks), sum(b.shape[1] for b in blocks)), dtype=np.bool_)
    row = column = 0
    for block in blocks:
        whole[row : row + block.shape[0], column : column + block.shape[1]] = block
        row, column = row + block.shape[0], column + block.shape[1]
    return whole


class CacheView:
    """The ``past_key_values`` of one forward: the part of transformers' cache interface that models call.

    A single sequence is read as a view of its extent. Several are gathered into one row: one copy per layer.
    """

    is_compileable = False

    def __init__(self, cache: SlotCache, row: PackedRow, device: torch.device) -> None:
        self._cache = cache
        self._write = _as_index(row.node_slots, device)
        self._read = _as_index(row.key_slots, device)
        self._num_keys = len(row.key_slots)
        self._num_past = len(row.key_slots) - len(row.node_slots)
        self._stop = max(row.node_slots) + 1

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._cache.write(layer_idx, (key_states, value_states), self._write, self._stop)
        keys, values = self._cache.rows[layer_idx]
        return keys[:, :, self._read], values[:, :, self._read]  # [1, heads, K, dim]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._num_past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._num_keys, 0


def _as_index(slots: list[int], device: torch.device) -> slice | torch.Tensor:
    if slots == list(range(slots[0], slots[0] + len(slots))):
        return slice(slots[0], slots[0] + len(slots))
    return torch.tensor(slots, device=device)
