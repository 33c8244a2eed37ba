"""Default size of the KV cache, and checks that it fits in memory."""

import torch

from draftwood.display import readable_size
from draftwood.errors import CapabilityError

MAX_CACHE_TOKENS = 65_536
_DRAFT_ROOM = 128  # slots for the draft tree of a sequence that fills its context


def default_cache_tokens(max_batch: int, context_length: int) -> int:
    return min(max_batch * (context_length + _DRAFT_ROOM), MAX_CACHE_TOKENS)


def check_room(cache_tokens: int, bytes_per_token: int, device: torch.device) -> None:
    """Refuses a cache that does not fit. Called before the weights are read, which can take minutes."""
    num_bytes = cache_tokens * bytes_per_token
    if not _can_allocate(num_bytes, device):
        raise CapabilityError(
            f"There is no room for the cache on {device}",
            got=f"{cache_tokens:,} positions of {bytes_per_token:,} bytes: {num_bytes:,} bytes",
            allowed=f"as many as the memory of {device} holds",
            next_step="Lower cache_tokens or max_batch, or use a smaller dtype.",
        )


def out_of_memory(device: torch.device, cache_bytes: int | None) -> CapabilityError:
    """Builds the error for a device that ran out of memory while the model was loaded."""
    cache = "" if cache_bytes is None else f", the cache alone takes {readable_size(cache_bytes)}"
    return CapabilityError(
        f"The model and its cache do not fit into the memory of {device}",
        got=f"out of memory{cache}",
        next_step="Lower cache_tokens or max_batch, use a smaller dtype or model, or device=cpu.",
    )


def _can_allocate(num_bytes: int, device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(num_bytes <= torch.cuda.get_device_properties(device).total_memory)
    try:
        # Like the cache, keys and values separately; untouched pages cost nothing.
        _ = [torch.empty(num_bytes // 2, dtype=torch.uint8) for _ in range(2)]
    except (RuntimeError, MemoryError, OverflowError, TypeError):  # the last two: sizes beyond 64 bits
        return False
    return True
