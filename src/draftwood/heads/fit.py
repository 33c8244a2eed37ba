"""What a head must know of its target: the shape, for which the configuration will do, and which model it is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from draftwood.disk import models_home
from draftwood.errors import CapabilityError, ModelError
from draftwood.heads.config import HeadConfig, check_fit
from draftwood.heads.formats import LoadedHead, load_head
from draftwood.models import (
    BUILT_IN,
    ModelConfig,
    is_entry_name,
    is_native,
    parse_config,
    read_count,
    read_json_config,
    resolve,
)
from draftwood.progress import Progress
from draftwood.targets import TINY_CONFIG, Target, tiny_target
from draftwood.targets.native import has_weights, load_parts


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetSizes:
    """The sizes of a target that the native decoder does not run."""

    hidden_size: int
    vocab_size: int
    num_layers: int


def native_shape(target: Target) -> ModelConfig | None:
    """The shape of a loaded target; None if it is not our own decoder that runs it."""
    shape = getattr(target, "config", None)
    return shape if isinstance(shape, ModelConfig) else None


def target_shape(name: str, progress: Progress | None = None) -> ModelConfig | TargetSizes:
    """The shape of the model of this name, which is fetched if it is not here yet."""
    if name == BUILT_IN:
        return TINY_CONFIG
    return _shape(_folder_here(name) or resolve(name, progress).path)


def shape_if_here(name: str) -> ModelConfig | TargetSizes | None:
    """As ``target_shape``, but nothing is fetched: None if the model is not on this disk."""
    folder = _folder_here(name)
    if folder is None:
        return TINY_CONFIG if name == BUILT_IN else None
    return _shape(folder)


def load_fitting(folder: Path, target: Target, dtype: torch.dtype) -> LoadedHead:
    """A head on the target's device; refuses one that was made for a target of another shape."""
    info = target.info
    loaded = load_head(folder, info.device, dtype, model=native_shape(target))
    problems = check_fit(loaded.config, info)
    if problems:
        raise ModelError(
            f"The head in {folder} does not fit {info.name}",
            got="; ".join(problems),
            next_step=f"See: draftwood inspect head {folder} --model ...",
        )
    return loaded


def fingerprint(norm: torch.Tensor) -> str:
    """Tells models apart by the final norm, ``norm [H]``, as it is in bfloat16.

    It is the same for one model in every number format, on every device, under every name, and in every GGUF file of
    it: files that hold matrices in a few bits keep norms as they are. Training changes it, unless it was left out of
    the training, as it is where LoRA layers are merged into a model.
    """
    bits = norm.detach().to(device="cpu", dtype=torch.bfloat16).contiguous().view(torch.int16)
    return hashlib.sha256(bits.numpy().astype("<i2").tobytes()).hexdigest()[:16]


def identity(target: Target) -> str:
    """Which model a target runs, wherever its files lie: shape and fingerprint; its name where it lends no norm."""
    info = target.info
    try:
        told = fingerprint(target.parts().norm)
    except CapabilityError:
        told = info.name
    sizes = f"{info.vocab_size}x{info.hidden_size}x{info.num_layers}"
    return f"{info.architecture} {sizes}, {info.num_parameters} parameters, {told}"


def fingerprint_if_here(name: str) -> str:
    """That of the model of this name; empty if its weights are not on this disk, or not of a model that we run.

    Weights that are here and cannot be read are an error.
    """
    if name == BUILT_IN:
        return fingerprint(tiny_target().parts().norm)
    folder = _folder_here(name)
    shape = None if folder is None else _shape(folder)
    if folder is None or not isinstance(shape, ModelConfig) or not has_weights(folder):
        return ""
    return fingerprint(load_parts(folder, shape, torch.bfloat16, torch.device("cpu")).norm)


def is_its_target(config: HeadConfig, name: str) -> bool | None:
    """Whether the head was trained for the model of this name; None where that cannot be told."""
    if not config.target_fingerprint:
        return None
    found = fingerprint_if_here(name)
    return found == config.target_fingerprint if found else None


def _folder_here(name: str) -> Path | None:
    places = [Path(name).expanduser(), *([models_home() / name] if is_entry_name(name) else [])]
    return next((place for place in places if place.is_dir()), None)


def _shape(folder: Path) -> ModelConfig | TargetSizes:
    config, generation = read_json_config(folder)
    if is_native(config):
        return parse_config(config, generation)
    return TargetSizes(
        hidden_size=read_count(config, "hidden_size"),
        vocab_size=read_count(config, "vocab_size"),
        num_layers=read_count(config, "num_hidden_layers"),
    )
