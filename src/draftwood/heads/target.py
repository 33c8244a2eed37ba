"""What a head must know of a target that is not loaded: its configuration alone is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftwood.target.base import Target
from draftwood.target.load import BUILT_IN, is_entry_name, read_json_config, resolve
from draftwood.target.native.config import ModelConfig, is_native, parse_config, whole_number
from draftwood.target.store import Progress, models_home
from draftwood.target.tiny import TINY_CONFIG


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


def _folder_here(name: str) -> Path | None:
    places = [Path(name).expanduser(), *([models_home() / name] if is_entry_name(name) else [])]
    return next((place for place in places if place.is_dir()), None)


def _shape(folder: Path) -> ModelConfig | TargetSizes:
    config, generation = read_json_config(folder)
    if is_native(config):
        return parse_config(config, generation)
    return TargetSizes(
        hidden_size=whole_number(config, "hidden_size"),
        vocab_size=whole_number(config, "vocab_size"),
        num_layers=whole_number(config, "num_hidden_layers"),
    )
