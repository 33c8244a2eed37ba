"""Looks at a model without fetching or converting it: where it is, and what its configuration says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from draftwood.disk import models_home
from draftwood.errors import ModelError
from draftwood.models import fetch
from draftwood.models.aliases import read_aliases
from draftwood.models.find import (
    BUILT_IN,
    KNOWN,
    built_in_has_no_folder,
    existing_path,
    is_entry_name,
    is_hub_id,
    read_json_config,
    unknown_model,
)
from draftwood.models.gguf import MAGIC, GgufFile, config_of, generation_config_of

Configs = tuple[dict[str, Any], dict[str, Any]]  # config.json and generation_config.json


def find_local(name: str) -> Path | None:
    """The folder or GGUF file of a model on this disk. None if it would have to be fetched first."""
    if name == BUILT_IN:
        raise built_in_has_no_folder()
    aliases = read_aliases()
    if name in aliases:
        if not aliases[name].exists():
            raise ModelError(
                f"The file or folder of {name!r} was moved or removed",
                got=aliases[name],
                next_step=f"Run: draftwood models add {name} PATH, or draftwood models rm {name}",
            )
        return aliases[name]
    entry = models_home() / name
    if name in KNOWN:
        return entry if entry.is_dir() else None
    path = existing_path(name)
    if path is not None:
        return path.absolute()
    if is_hub_id(name):
        return fetch.find_snapshot(name)
    if is_entry_name(name) and entry.is_dir():
        return entry
    raise unknown_model(name)


def read_configs(name: str) -> Configs:
    """The configuration of a model. Of a model on the hub, only that is fetched."""
    path = find_local(name)
    if path is None and is_hub_id(name):
        path = fetch.fetch_configs(name)
    if path is None:
        raise not_here(name)
    return read_configs_of(path)


def read_configs_of(path: Path) -> Configs:
    if not is_gguf(path):
        return read_json_config(path)
    with GgufFile(path) as file:
        return config_of(file), generation_config_of(file.metadata)


def read_final_norm(path: Path) -> npt.NDArray[np.float32]:
    """The final norm ``[H]`` of a GGUF file, which identifies a model."""
    with GgufFile(path) as file:
        return file.floats(file.tensors["output_norm.weight"])


def is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    try:
        with path.open("rb") as handle:
            return handle.read(len(MAGIC)) == MAGIC or path.suffix == ".gguf"
    except OSError as error:
        raise ModelError(f"{path} cannot be read", got=error.strerror or error) from error


def not_here(name: str) -> ModelError:
    return ModelError(
        "This model is not on this disk", got=repr(name), next_step=f"Fetch it with: draftwood models get {name}"
    )
