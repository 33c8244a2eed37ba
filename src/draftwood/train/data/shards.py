"""Shard files with examples, written atomically, with a checksum and the id of their run.

A shard concatenates its texts: ``token_ids [total]`` int32, ``answered [total]`` uint8, ``offsets [n + 1]`` int64
(text i is from offset i to offset i + 1), ``prompts [n]`` int64 (index of the prompt of a text; a
conversation may give several texts).
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from draftwood.disk import new_file, parse_json
from draftwood.errors import DraftwoodError
from draftwood.train.base import Example

FORMAT, VERSION = "draftwood-training-data", 1
_TYPES = {"token_ids": np.int32, "answered": np.uint8, "offsets": np.int64, "prompts": np.int64}
AGAIN = "Delete the file and run the command that made it again: it makes this part again."

Counts = dict[str, int]


class DataError(DraftwoodError):
    """Training data cannot be read, or belongs to another run or model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    token_ids: npt.NDArray[np.int32]  # [total]
    answered: npt.NDArray[np.uint8]  # [total]
    offsets: npt.NDArray[np.int64]  # [n + 1]
    prompts: npt.NDArray[np.int64]  # [n]
    lost: Mapping[str, int]  # conversations that were dropped or cut, by reason

    @classmethod
    def of(cls, examples: Sequence[tuple[int, Example]], lost: Mapping[str, int]) -> Self:
        """Build from examples with the index of their prompt."""
        texts = [example for _, example in examples]
        lengths = [len(text.token_ids) for text in texts]
        return cls(
            token_ids=np.concatenate([np.empty(0, np.int32), *(text.token_ids for text in texts)]),
            answered=np.concatenate([np.empty(0, np.uint8), *(text.answered.astype(np.uint8) for text in texts)]),
            offsets=np.cumsum([0, *lengths], dtype=np.int64),
            prompts=np.array([prompt for prompt, _ in examples], dtype=np.int64),
            lost=dict(lost),
        )

    def counts(self) -> Counts:
        return {
            "examples": len(self.prompts),
            "tokens": len(self.token_ids),
            "answered_tokens": int(self.answered.sum()),
        }

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        return {name: getattr(self, name) for name in _TYPES}


def shard_name(number: int) -> str:
    return f"part-{number:05d}.safetensors"


def write_shard(path: Path, shard: Shard, number: int, run: str) -> None:
    """Write a shard of the run ``run`` (``Manifest.run_id``)."""
    about = {"format": FORMAT, "version": VERSION, "run": run, "number": number, "lost": dict(shard.lost)}
    about["sha256"] = _checksum(shard.arrays(), about)
    # A single metadata key: the order of several keys in the file would be random.
    try:
        with new_file(path) as temporary:
            temporary.write_bytes(save(shard.arrays(), {"about": json.dumps(about, sort_keys=True)}))
    except DraftwoodError as error:
        raise DataError(
            error.what,
            got=error.got,
            next_step="Free some space, then run the same command again: it continues from here.",
        ) from error


def read_shard(path: Path, number: int, run: str) -> Shard:
    """Read a shard. Raise an error if it is damaged, or belongs to another run or position."""
    try:
        with safe_open(path, framework="numpy") as file:
            about = parse_json((file.metadata() or {})["about"])
            arrays = {name: file.get_tensor(name) for name in _TYPES}
        checksum = about.pop("sha256")
        lost = {str(reason): int(count) for reason, count in about["lost"].items()}
        same_run = (about["format"], about["version"], about["run"], about["number"]) == (FORMAT, VERSION, run, number)
    except FileNotFoundError as error:
        raise DataError("A part of the training data is missing", got=path, next_step=AGAIN) from error
    except (SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise make_damage_error(path, error) from error
    if not same_run:
        raise DataError("A part of the training data belongs to another run", got=path, next_step=AGAIN)
    if checksum != _checksum(arrays, about) or not _is_sound(arrays):
        raise make_damage_error(path, "wrong checksum")
    return Shard(**arrays, lost=lost)


def make_damage_error(path: Path, why: object) -> DataError:
    return DataError("The training data is damaged", got=f"{path}: {why}", next_step=AGAIN)


def _checksum(arrays: Mapping[str, npt.NDArray[Any]], about: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _is_sound(arrays: Mapping[str, npt.NDArray[Any]]) -> bool:
    offsets, total = arrays["offsets"], len(arrays["token_ids"])
    return (
        all(arrays[name].dtype == kind and arrays[name].ndim == 1 for name, kind in _TYPES.items())
        and len(arrays["answered"]) == total
        and len(offsets) == len(arrays["prompts"]) + 1
        and (int(offsets[0]), int(offsets[-1])) == (0, total)
        and bool((np.diff(offsets) > 0).all())
        and bool((arrays["answered"] <= 1).all())
    )
