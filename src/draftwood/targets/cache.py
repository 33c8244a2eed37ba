"""The KV cache of the native target, allocated once."""

from array import array

import torch

from draftwood.targets.slots import SlotBook


class KVCache(SlotBook):
    """Keys and values of every layer, ``[layers, kv_heads, slots, head_dim]``: the keys of one head are contiguous."""

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(num_slots)
        shape = (num_layers, num_kv_heads, num_slots, head_dim)
        # On a CPU, pages cost nothing until a sequence writes to them.
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def move_rows(self, sources: list[int], first: int) -> None:
        slots = array("q", sources)  # hundreds, where a sequence moves: torch reads a list slowly
        index = torch.frombuffer(slots, dtype=torch.int64).to(self.keys.device)
        for rows in (self.keys, self.values):
            rows[:, :, first : first + len(sources)] = rows[:, :, index]
