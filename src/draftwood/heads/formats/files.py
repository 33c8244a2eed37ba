"""The files of a head: config.json, and tensors in safetensors or pickles (tensors only), whole or in shards."""

import json
import pickle
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftwood.disk import apply_umask, new_file
from draftwood.errors import ModelError, OptionError

CONFIG = "config.json"
# In the order of preference; an index lists the shards.
WEIGHTS = (
    "model.safetensors.index.json",
    "model.safetensors",
    "pytorch_model.bin.index.json",
    "pytorch_model.bin",
    "medusa_lm_head.safetensors",
    "medusa_lm_head.pt",
    "hydra_lm_head.safetensors",
    "hydra_lm_head.pt",
)
_DOWNLOAD = "Download the head again."


def read_config_file(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ModelError(
            "There is no such folder",
            got=folder,
            allowed="the folder of a head: config.json and its tensors",
            next_step="Did you mean its folder?" if folder.is_file() else None,
        )
    path = folder / CONFIG
    if not path.is_file():
        raise ModelError("The folder has no config.json, so it does not contain a head", got=folder)
    return _read_json(path)


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Load all tensors of the folder by name, as stored."""
    tensors: dict[str, torch.Tensor] = {}
    for path in _list_files(folder):
        content = _load(path)
        twice = sorted(set(tensors) & set(content))
        if twice:
            raise ModelError("The shards of the head contain the same tensors twice", got=", ".join(twice))
        tensors |= content
    return tensors


def _list_files(folder: Path) -> list[Path]:
    found = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if found is None:
        raise ModelError("The folder has no weights", got=folder, allowed=WEIGHTS)
    if found.suffix != ".json":
        return [found]
    shards = _read_json(found).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(_is_plain(name) for name in shards.values()):
        raise ModelError(f"{found} does not say which file holds which tensor", next_step=_DOWNLOAD)
    paths = [folder / name for name in sorted(set(shards.values()))]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ModelError("Shards of the head are missing", got=", ".join(missing), next_step=_DOWNLOAD)
    return paths


def _is_plain(name: object) -> bool:
    """Whether ``name`` is a file name without a folder."""
    return isinstance(name, str) and Path(name).name == name


def _load(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise ModelError(
            f"{path.name} cannot be read",
            got=str(error).split("\n")[0][:200],
            allowed="safetensors, or a file of torch.save that contains only tensors",
            next_step=f"{_DOWNLOAD} Code in such files is never run.",
        ) from error
    if not isinstance(content, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in content.values()):
        raise ModelError(f"{path.name} must contain tensors by name", got=type(content).__name__)
    return {str(name): tensor for name, tensor in content.items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON", got=error, next_step=_DOWNLOAD) from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must contain a JSON object", got=type(content).__name__, next_step=_DOWNLOAD)
    return content


def write_folder(
    final: Path, content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], weights: str, *, force: bool
) -> None:
    """Write the two files of a head atomically: the folder is complete or does not change."""
    if final.is_file():
        raise OptionError("A head is saved to a folder, but this is a file", got=final)
    if final.is_dir() and any(final.iterdir()) and not force:
        raise OptionError(f"{final} exists", next_step="Name another folder, or replace it with --force.")
    with _replace_folder(final) as folder:
        (folder / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        _write(dict(tensors), folder / weights)


def _write(tensors: dict[str, torch.Tensor], path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file(tensors, path)
        apply_umask(path)
        return
    try:
        torch.save(tensors, path)
    except RuntimeError as error:  # how torch reports a full disk
        raise OSError(str(error)) from error


@contextmanager
def _replace_folder(final: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces ``final`` if the block succeeds."""
    aside = final.with_name(f".{final.name}.old-{uuid.uuid4().hex[:12]}")
    try:
        with new_file(final) as folder:
            folder.mkdir()
            try:
                yield folder
                if final.is_dir():
                    final.rename(aside)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
    except BaseException:
        if aside.is_dir():
            aside.rename(final)
        raise
    shutil.rmtree(aside, ignore_errors=True)
