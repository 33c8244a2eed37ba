"""Lists and describes the models on this disk, for ``draftwood models``."""

import json
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from draftwood.disk import lock_entry, models_home, remove_folder
from draftwood.errors import ModelError
from draftwood.models.aliases import add_alias, read_aliases, remove_alias
from draftwood.models.config import architecture_of, is_native, parse_config, read_count
from draftwood.models.find import (
    BUILT_IN,
    KNOWN,
    built_in_has_no_folder,
    existing_path,
    is_entry_name,
    read_record,
    stored_file,
)
from draftwood.models.gguf import GgufFile
from draftwood.models.look import find_local, is_gguf, not_here, read_configs_of

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # by their names in safetensors files


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelEntry:
    """A model that can be loaded by name, on this disk or not yet fetched."""

    name: str
    title: str
    licence: str | None
    path: Path | None  # None: not fetched yet
    num_bytes: int  # on this disk; an estimate if it is not fetched yet
    origin: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """What a model folder contains, read without loading it."""

    name: str
    path: Path
    architecture: str
    native: bool  # whether a native decoder runs it
    num_parameters: int
    storage_dtype: str  # of more than a hundredth of the weights, the most frequent first
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    cache_bytes_per_token: dict[str, int]  # by dtype of the run
    cache_bytes_full_context: dict[str, int]
    num_bytes: int
    licence: str | None
    origin: str | None
    has_chat_template: bool


def list_models() -> list[ModelEntry]:
    """Lists the known models, then all other models in the cache, then the names that the user gave."""
    home = models_home()
    names = sorted(path.name for path in home.glob("[!.]*") if path.is_dir()) if home.is_dir() else []
    entries = [_entry(name) for name in [*KNOWN, *(name for name in names if name not in KNOWN)]]
    return [*entries, *(_alias_entry(name, path) for name, path in sorted(read_aliases().items()))]


def model_path(name: str) -> Path:
    """Returns the folder or GGUF file of a model on this disk; never fetches it."""
    path = find_local(name)
    if path is None:
        raise not_here(name)
    return path


def add_model(name: str, path: str) -> Path:
    """Gives a name to a folder or a GGUF file; returns its full path."""
    found = existing_path(path)
    if found is None or not (found.is_dir() or is_gguf(found)):
        raise ModelError(
            "There is no model here", got=repr(path), allowed="a folder in Hugging Face layout, a .gguf file"
        )
    read_configs_of(found)  # raises if it is not a model
    aliases = read_aliases()
    add_alias(name, found.absolute(), {BUILT_IN, *(entry.name for entry in list_models() if entry.name not in aliases)})
    return found.absolute()


def remove_model(name: str) -> int:
    """Removes a model from the cache, or a name that the user gave; returns the number of bytes freed.

    Folders and files outside the cache are never removed.
    """
    if name in read_aliases():
        remove_alias(name)
        return 0
    folder = models_home() / name
    if not is_entry_name(name) or not folder.is_dir():
        if name == BUILT_IN:
            raise built_in_has_no_folder()
        raise ModelError(
            "This model is not in the cache",
            got=repr(name),
            allowed=[entry.name for entry in list_models() if entry.path] or "the cache is empty",
        )
    with lock_entry(name):
        freed = _folder_bytes(folder)
        remove_folder(folder)
    return freed


def describe(path: Path) -> ModelDescription:
    """Reads the configuration and the headers of the weight files, of a folder or a GGUF file."""
    config, generation = read_configs_of(path)
    sizes = _sizes(config, generation)
    contents = _read_gguf(path) if is_gguf(path) else _read_folder(path)
    per_token = {
        name: 2 * sizes["layers"] * sizes["kv_heads"] * sizes["head_dim"] * width for name, width in _ITEM_BYTES.items()
    }
    counts = contents.weights_by_dtype
    return ModelDescription(
        name=path.name,
        path=path,
        architecture=architecture_of(config),
        native=is_native(config),
        num_parameters=sum(counts.values()),
        storage_dtype=", ".join(n for n, count in counts.most_common() if count > counts.total() / 100) or "unknown",
        num_layers=sizes["layers"],
        hidden_size=sizes["hidden"],
        vocab_size=sizes["vocab"],
        context_length=sizes["context"],
        cache_bytes_per_token=per_token,
        cache_bytes_full_context={name: count * sizes["context"] for name, count in per_token.items()},
        num_bytes=contents.num_bytes,
        licence=contents.licence,
        origin=contents.origin,
        has_chat_template=contents.has_chat_template,
    )


class _Contents(NamedTuple):
    """What the files of a model say besides the configuration."""

    weights_by_dtype: Counter[str]
    num_bytes: int
    licence: str | None
    origin: str | None
    has_chat_template: bool


def _read_folder(folder: Path) -> _Contents:
    origin = read_record(folder).get("source")
    counts = _weights_by_dtype(folder)
    return _Contents(counts, _folder_bytes(folder), _licence(folder), origin, _has_chat_template(folder))


def _read_gguf(path: Path) -> _Contents:
    counts: Counter[str] = Counter()
    with GgufFile(path) as file:
        for entry in file.tensors.values():
            counts[_DTYPE_NAMES.get(entry.format_name, entry.format_name)] += prod(entry.shape)
        licence = file.metadata.get("general.license")
        has_template = "tokenizer.chat_template" in file.metadata
        size = file.size
    return _Contents(counts, size, licence if isinstance(licence, str) else None, f"gguf:{path.name}", has_template)


def _alias_entry(name: str, path: Path) -> ModelEntry:
    here = path.exists()
    size = 0 if not here else _folder_bytes(path) if path.is_dir() else path.stat().st_size
    origin = f"{path}{'' if here else ' (moved or removed)'}"
    return ModelEntry(name=name, title=name, licence=None, path=path if here else None, num_bytes=size, origin=origin)


def _entry(name: str) -> ModelEntry:
    known, folder = KNOWN.get(name), models_home() / name
    here = folder.is_dir()
    return ModelEntry(
        name=name,
        title=known.title if known else name,
        licence=_licence(folder),
        path=folder if here else None,
        num_bytes=_folder_bytes(folder) if here else known.num_bytes if known else 0,
        origin=read_record(folder).get("source") if here else None,
    )


def _sizes(config: dict[str, Any], generation: dict[str, Any]) -> dict[str, int]:
    """Reads the sizes: with the native reader if it accepts the model, else from the usual keys."""
    if is_native(config):
        shape = parse_config(config, generation)
        return {
            "layers": shape.num_layers,
            "hidden": shape.hidden_size,
            "vocab": shape.vocab_size,
            "context": shape.context_length,
            "kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
        }

    def first(*keys: str) -> int:
        return next((read_count(config, key) for key in keys if config.get(key)), 0)

    hidden, heads = first("hidden_size", "n_embd"), first("num_attention_heads", "n_head")
    return {
        "layers": first("num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "vocab": first("vocab_size"),
        "context": first("max_position_embeddings", "n_positions", "n_ctx"),
        "kv_heads": first("num_key_value_heads") or heads,
        "head_dim": first("head_dim") or (hidden // heads if heads else 0),
    }


def _weights_by_dtype(folder: Path) -> Counter[str]:
    """Counts the weights of each dtype, from the headers of the weight files alone; those of a GGUF file come first."""
    counts: Counter[str] = Counter()
    stored = stored_file(folder)
    if stored is not None:
        with GgufFile(stored) as file:
            for entry in file.tensors.values():
                counts[_DTYPE_NAMES.get(entry.format_name, entry.format_name)] += prod(entry.shape)
        return counts
    for path in sorted(folder.glob("*.safetensors")):
        for dtype, num_weights in _read_header(path):
            counts[_DTYPE_NAMES.get(dtype, dtype)] += num_weights
    return counts


def _read_header(path: Path) -> list[tuple[str, int]]:
    """Reads the dtype and the number of weights of every tensor in the file."""
    try:
        with path.open("rb") as handle:
            (length,) = struct.unpack("<Q", handle.read(8))
            if length > path.stat().st_size:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(handle.read(length))
        return [(str(e["dtype"]), int(prod(e["shape"]))) for name, e in header.items() if name != "__metadata__"]
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError, struct.error) as error:
        raise ModelError(f"{path} cannot be read", got=error, next_step="Fetch the model again.") from error


def _licence(folder: Path) -> str | None:
    known = KNOWN.get(folder.name)
    if known is not None and folder == models_home() / folder.name:
        return known.licence
    licence = read_record(folder).get("licence")
    return str(licence) if licence else None


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and '"chat_template"' in path.read_text(encoding="utf-8", errors="replace")


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
