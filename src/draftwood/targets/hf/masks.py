"""4-D additive attention masks for transformers models.

A model passes a prepared 4-D mask to its attention unchanged. Models with several layer types take a dictionary with
one mask per type. Windows and chunks are counted in positions, not in cache slots, since siblings of a tree share a
position.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from draftwood.targets.hf.cache import PackedRow

_LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

# Windows that a model applies by cache slot inside its own attention, which a mask cannot correct.
_BUILT_IN_WINDOWS = (
    "window_size",
    "attention_window",
    "attention_window_size",
    "local_attention",
    "sliding_windows",
    "keep_window_size",
)

# Models with ALiBi whose configuration does not mention it; others have the field "alibi".
_ALIBI_MODELS = ("bloom", "mpt")

# The two fields from which transformers' own mask functions read windows.
_WINDOW_FIELDS = ("sliding_window", "attention_chunk_size")

BY_TYPE, WINDOWED, FULL = "one mask per layer type", "one windowed mask", "one full mask"


class Reach(NamedTuple):
    """How far back a layer attends: everything, the last ``window`` positions, or the same ``chunk`` of the text."""

    window: int | None = None
    chunk: int | None = None


def find_obstacles(config: Any, context_length: int) -> list[str]:
    """The properties of a configuration that make trees inexact, even where a short probe would not show it."""
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
    if getattr(config, "alibi", False) or getattr(config, "model_type", "") in _ALIBI_MODELS:
        found.append("ALiBi: attention biased by the distance of cache rows instead of positions")
    if rope_fields(config)[0] == "dynamic":
        found.append("rope that changes with the longest sequence of a batch (rope_type=dynamic)")
    return found


def rope_fields(config: Any) -> tuple[str, Mapping[str, Any]]:
    """The rope variant and its parameters."""
    fields: Mapping[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return str(fields.get("rope_type") or fields.get("type") or "default"), fields


def mask_styles(config: Any) -> list[str]:
    """The styles of masks to try with a model, the most likely first; the probe decides."""
    styles = [BY_TYPE] if getattr(config, "layer_types", None) else []
    if getattr(config, "sliding_window", None):
        styles.append(WINDOWED)
    return [*styles, FULL]


def reach_by_layer_type(style: str, config: Any) -> dict[str, Reach]:
    """The reach of each mask of a style, by layer type; a single mask for all layers has the key ""."""
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
def shrink_windows(model: nn.Module, config: Any, size: int) -> Iterator[None]:
    """Shrink the model's windows temporarily, so that a few tokens show whether they are applied correctly."""
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


def build_masks(
    by_type: Mapping[str, Reach], row: PackedRow, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The ``attention_mask`` of a model: 0 where a node may attend, the dtype's lowest value elsewhere."""
    made: dict[Reach, torch.Tensor] = {}
    for reach in by_type.values():
        if reach not in made:
            made[reach] = _build_mask(reach, row, dtype, device)
    if "" in by_type:
        return made[by_type[""]]
    return {name: made[reach] for name, reach in by_type.items()}


def _build_mask(reach: Reach, row: PackedRow, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    visible = row.visible
    if reach.window is not None:
        visible = visible & (row.positions[:, None] - row.key_positions[None, :] < reach.window)
    if reach.chunk is not None:
        visible = visible & (row.positions[:, None] // reach.chunk == row.key_positions[None, :] // reach.chunk)
    hidden = torch.from_numpy(np.logical_not(visible)).to(device)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, torch.finfo(dtype).min)
    return mask[None, None]  # [1, 1, N, K]
