"""The manifest of a folder of training data.

It has no date: the same command writes the same bytes. Everything that the answers depend on identifies the run. Only
the same run can continue a folder.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from draftwood.disk import parse_json, write_json
from draftwood.errors import OptionError
from draftwood.heads import identify_target
from draftwood.targets import Target
from draftwood.train.data.shards import FORMAT, VERSION, Counts, DataError

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    model: dict[str, Any]  # name, fingerprint, dtype, vocab_size
    settings: dict[str, Any]  # DataSettings.recorded()
    sources: list[dict[str, Any]]  # files: name, sha256, prompts taken and skipped
    prompts: int  # from files and self-made
    licence: str = ""
    complete: bool = False
    counts: Counts = field(default_factory=dict)  # totals
    shards: list[Counts] = field(default_factory=list)

    def identity(self) -> dict[str, Any]:
        """Return everything that the answers depend on."""
        names = ("model", "settings", "sources", "prompts")
        return {name: getattr(self, name) for name in names}

    @property
    def run_id(self) -> str:
        content = {"format": FORMAT, "version": VERSION, **self.identity()}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def num_shards(self) -> int:
        return -(-self.prompts // int(self.settings["shard_size"]))

    def check_model(self, target: Target, folder: Path) -> None:
        """Raise an error if another model generated the data: the head would learn the wrong distribution."""
        if self.model["fingerprint"] != identify_target(target):
            raise DataError(
                f"The training data in {folder} was written by another model",
                got=f"{target.info.name} ({identify_target(target)})",
                allowed=f"{self.model['name']} ({self.model['fingerprint']})",
                next_step="Make data with this model: draftwood train data ... --model NAME --out FOLDER",
            )


def describe_model(target: Target) -> dict[str, Any]:
    info = target.info
    return {
        "name": info.name,
        "fingerprint": identify_target(target),
        "dtype": str(info.dtype).removeprefix("torch."),
        "vocab_size": info.vocab_size,
    }


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / MANIFEST, {"format": FORMAT, "version": VERSION, **asdict(manifest)})


def read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
        if (content["format"], content["version"]) != (FORMAT, VERSION):
            raise ValueError(f"{content['format']} {content['version']}")
        manifest = Manifest(**{f.name: content[f.name] for f in fields(Manifest)})
        _ = manifest.model["fingerprint"], manifest.model["vocab_size"], manifest.num_shards
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} has no training data",
            got=f"no {MANIFEST} there",
            next_step="Use the --out folder of draftwood train data.",
        ) from error
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise DataError(f"{path} cannot be read", got=error, allowed=f"{FORMAT} {VERSION}") from error
    return manifest


def check_same_run(folder: Path, before: Manifest, now: Manifest) -> None:
    """Raise an error that names the differences if the folder was started with other settings."""
    old, new = _flatten(before.identity()), _flatten(now.identity())
    different = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if different:
        raise OptionError(
            f"{folder} was started with other settings",
            got=", ".join(f"{name} {new.get(name)}" for name in different),
            allowed=", ".join(f"{name} {old.get(name)}" for name in different),
            next_step="Use the original settings, or another folder.",
        )


def _flatten(identity: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in identity.items():
        if isinstance(value, dict):
            found |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            found[name] = value
    return found
