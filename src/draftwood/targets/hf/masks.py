"""Which earlier positions a layer may see, as 4-D additive masks for transformers models.

A model hands a prepared 4-D mask to its attention as it is. Models whose layers differ take a dictionary with one mask
a layer type. Windows and chunks are counted in positions, not in cache slots: the nodes of a tree stand in one row, but
siblings share a position.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from draftwood.targets.hf.cache import PackedRow

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

# Windows that a model applies inside its own attention, by cache slot: a mask cannot put them right.
_BUILT_IN_WINDOWS = (
    "window_size",
    "attention_window",
    "attention_window_size",
    "local_attention",
    "sliding_windows",
    "keep_window_size",
)

# The two fields through which transformers' own mask functions learn of windows.
_WINDOW_FIELDS = ("sliding_window", "attention_chunk_size")

BY_TYPE, WINDOWED, FULL = "one mask a layer type", "one windowed mask", "one full mask"


class Reach(NamedTuple):
    """How far back a layer looks: everything, the last ``window`` positions, or its own ``chunk`` of the text."""

    window: int | None = None
    chunk: int | None = None


def obstacles(config: Any, context_length: int) -> list[str]:
    """What in a configuration says that a tree cannot be run exactly, whatever a short probe shows."""
    found = []
    if getattr(config, "is_encoder_decoder", False):
        found.append("it has an encoder")
    unknown = sorted(set(getattr(config, "layer_types", None) or ()) - set(_LAYER_TYPES))
    if unknown:
        found.append(f"layers of type {', '.join(unknown)}")
    for field in _BUILT_IN_WINDOWS:
        size = getattr(config, field, None)
        if isinstance(size, int) and not isinstance(size, bool) and 0 < size < context_length:
            found.append(f"a built-in attention window ({field}={size})")
    if getattr(config, "attn_temperature_tuning", False):
        # Llama 4 counts cache rows instead of reading positions; it shows only past thousands of tokens.
        found.append("attention scaled by cache rows instead of positions (attn_temperature_tuning)")
    if rope_fields(config)[0] == "dynamic":
        found.append("rope that changes with the longest sequence of a batch (rope_type=dynamic)")
    return found


def rope_fields(config: Any) -> tuple[str, Mapping[str, Any]]:
    """The variant of rotary positions, and its parameters."""
    fields: Mapping[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return str(fields.get("rope_type") or fields.get("type") or "default"), fields


def mask_styles(config: Any) -> list[str]:
    """The ways to hand masks to a model that are worth a try, the likeliest first; the probe decides."""
    styles = [BY_TYPE] if getattr(config, "layer_types", None) else []
    if getattr(config, "sliding_window", None):
        styles.append(WINDOWED)
    return [*styles, FULL]


def reaches(style: str, config: Any) -> dict[str, Reach]:
    """The reach of every mask of a style, by layer type; a single mask for all layers stands under ""."""
    window = getattr(config, "sliding_window", None) or None
    by_type = {
        "full_attention": Reach(),
        "sliding_attention": Reach(window=window),
        "chunked_attention": Reach(chunk=getattr(config, "attention_chunk_size", None)),
    }
    if style == BY_TYPE:
        return {name: by_type[name] for name in sorted(set(config.layer_types))}
    return {"": Reach(window=window) if style == WINDOWED else Reach()}


@contextmanager
def small_windows(model: nn.Module, config: Any, size: int) -> Iterator[None]:
    """Shrinks the model's windows for a while, so that a handful of tokens shows whether they are applied rightly."""
    holders: list[Any] = [config, *(m for m in model.modules() if type(m).__module__.startswith("transformers"))]
    changed: list[tuple[Any, str, Any]] = []
    for holder in holders:
        for field in _WINDOW_FIELDS:
            old = getattr(holder, field, None)
            if isinstance(old, int) and not isinstance(old, bool) and old > size:
                changed.append((holder, field, old))
                setattr(holder, field, size)
    try:
        yield
    finally:
        for holder, field, old in changed:
            setattr(holder, field, old)


def additive_masks(
    by_type: Mapping[str, Reach], row: PackedRow, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | dict[str, torch.Tensor]:
    """What a model takes as ``attention_mask``: 0 where a node may look, the type's lowest value elsewhere."""
    made: dict[Reach, torch.Tensor] = {}
    for reach in by_type.values():
        if reach not in made:
            made[reach] = _additive(reach, row, dtype, device)
    if "" in by_type:
        return made[by_type[""]]
    return {name: made[reach] for name, reach in by_type.items()}


def _additive(reach: Reach, row: PackedRow, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    visible = row.visible
    if reach.window is not None:
        visible = visible & (row.positions[:, None] - row.key_positions[None, :] < reach.window)
    if reach.chunk is not None:
        visible = visible & (row.positions[:, None] // reach.chunk == row.key_positions[None, :] // reach.chunk)
    hidden = torch.from_numpy(np.logical_not(visible)).to(device)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)
    return mask[None, None]  # [1, 1, N, K]
