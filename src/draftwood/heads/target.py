"""Targets as heads see them: their shape, which config.json is enough for, and their fingerprint."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftwood.errors import CapabilityError, ModelError
from draftwood.models import (
    BUILT_IN,
    ModelConfig,
    find_local,
    is_gguf,
    is_native,
    parse_config,
    read_configs,
    read_configs_of,
    read_count,
    read_final_norm,
)
from draftwood.targets import TINY_CONFIG, Target, tiny_target
from draftwood.targets.native import has_weights, load_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSizes:
    """The sizes of a target that the native decoder does not run."""

    hidden_size: int
    vocab_size: int
    num_layers: int


def native_config(target: Target) -> ModelConfig | None:
    """The configuration of a loaded native target; None for other targets."""
    config = getattr(target, "config", None)
    return config if isinstance(config, ModelConfig) else None


def load_target_shape(name: str) -> ModelConfig | TargetSizes:
    """The shape of a model. Only its configuration is read, or fetched from the hub."""
    return TINY_CONFIG if name == BUILT_IN else _read_shape(*read_configs(name))


def find_local_shape(name: str) -> ModelConfig | TargetSizes | None:
    """The shape of a model; None if the model is not on this disk."""
    if name == BUILT_IN:
        return TINY_CONFIG
    path = _find_path(name)
    return None if path is None else _read_shape(*read_configs_of(path))


def fingerprint(norm: torch.Tensor) -> str:
    """Identify a model by its final norm ``[H]``, rounded to bfloat16.

    The fingerprint is the same in every number format, on every device, under every name, and in every GGUF file of the
    model, since quantized files do not quantize norms. Training changes it unless it leaves the norm out, as merged
    LoRA layers do.
    """
    bits = norm.detach().to(device="cpu", dtype=torch.bfloat16).contiguous().view(torch.int16)
    return hashlib.sha256(bits.numpy().astype("<i2").tobytes()).hexdigest()[:16]


def find_local_fingerprint(name: str) -> str:
    """The fingerprint of a model; empty if it is not native or its weights are not on this disk.

    Raises if there are weights that cannot be read.
    """
    if name == BUILT_IN:
        return fingerprint(tiny_target().parts().norm)
    path = _find_path(name)
    shape = None if path is None else _read_shape(*read_configs_of(path))
    if path is None or not isinstance(shape, ModelConfig):
        return ""
    if is_gguf(path):
        return fingerprint(torch.tensor(read_final_norm(path)))
    if not has_weights(path):
        return ""
    return fingerprint(load_parts(path, shape, torch.bfloat16, torch.device("cpu")).norm)


def identify_target(target: Target) -> str:
    """Identify the model of a target by shape and fingerprint, or by its name if it does not expose its norm."""
    info = target.info
    try:
        mark = fingerprint(target.parts().norm)
    except CapabilityError:
        mark = info.name
    sizes = f"{info.vocab_size}x{info.hidden_size}x{info.num_layers}"
    return f"{info.architecture} {sizes}, {info.num_parameters} parameters, {mark}"


def _find_path(name: str) -> Path | None:
    try:
        return find_local(name)
    except ModelError:  # a name that exists elsewhere only
        return None


def _read_shape(config: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig | TargetSizes:
    if is_native(config):
        return parse_config(config, generation)
    return TargetSizes(
        hidden_size=read_count(config, "hidden_size"),
        vocab_size=read_count(config, "vocab_size"),
        num_layers=read_count(config, "num_hidden_layers"),
    )
