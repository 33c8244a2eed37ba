"""Reads a ``TargetInfo`` from a transformers configuration."""

from typing import Any

import torch

from draftwood.errors import ModelError
from draftwood.targets.base import TargetInfo
from draftwood.targets.hf.masks import rope_fields

_CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_DEFAULT_CONTEXT = 32_768  # for models without a limit, such as recurrent ones


def describe(model: Any, config: Any, name: str | None, backend: str) -> TargetInfo:
    """Describe a model. The cache size per token is measured later, on real keys and values."""
    try:
        return _read_info(model, config, name, backend)
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelError(
            f"The configuration of {type(model).__name__} does not describe a language model",
            got=f"{type(error).__name__}: {error}",
            next_step="Check config.json and generation_config.json.",
        ) from error


def _read_info(model: Any, config: Any, name: str | None, backend: str) -> TargetInfo:
    return TargetInfo(
        name=name or getattr(model, "name_or_path", "") or type(model).__name__,
        architecture=type(model).__name__,
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
        context_length=_context_length(config),
        dtype=model.dtype,
        device=torch.device(model.device),
        eos_token_ids=_eos_token_ids(getattr(model, "generation_config", None), config),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        cache_bytes_per_token=0,
        backend=backend,
    )


def _context_length(config: Any) -> int:
    found = (getattr(config, field, None) for field in _CONTEXT_FIELDS)
    length = next((int(value) for value in found if value), _DEFAULT_CONTEXT)
    kind, fields = rope_fields(config)
    if kind == "longrope":
        # Beyond its original context, longrope rotates all positions by other angles, cached ones included: one deep
        # tree node would change what the others see. Up to there trees are exact.
        original = fields.get("original_max_position_embeddings")
        length = min(length, int(original or getattr(config, "original_max_position_embeddings", None) or length))
    return length


def _eos_token_ids(*holders: Any) -> tuple[int, ...]:
    found: list[int] = []
    for holder in holders:
        value = getattr(holder, "eos_token_id", None)
        for token in value if isinstance(value, (list, tuple)) else [value]:
            if token is not None and int(token) not in found:
                found.append(int(token))
    return tuple(found)
