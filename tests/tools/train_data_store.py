"""Training data without a generation run: random texts, in memory or in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import VOCAB_SIZE
from draftwood.train.base import Example
from draftwood.train.data.manifest import Manifest, describe_model, write_manifest
from draftwood.train.data.read import Folder, TrainingData
from draftwood.train.data.shards import Shard, shard_name, write_shard

TARGET = tiny_target(cache_tokens=64)


def manifest_of(num_prompts: int, shard_size: int) -> Manifest:
    settings = {"shard_size": shard_size, "seed": 0}
    return Manifest(model=describe_model(TARGET), settings=settings, sources=[], prompts=num_prompts, complete=True)


def texts(lengths: Sequence[int], seed: int = 0) -> list[Example]:
    """Random texts; the second half of each counts as written by the target."""
    rng = np.random.default_rng(seed)
    return [
        Example(rng.integers(0, VOCAB_SIZE, size).astype(np.int32), np.arange(size) >= size // 2) for size in lengths
    ]


def data_of(examples: Sequence[Example], prompts: Sequence[int] | None = None) -> TrainingData:
    owners = range(len(examples)) if prompts is None else prompts
    shard = Shard.of(list(zip(owners, examples, strict=True)), {})
    return TrainingData._concatenate_shards(Folder(Path("texts"), manifest_of(len(examples), 10_000)), [shard])


def stored(folder: Path, examples: Sequence[Example], shard_size: int = 2, *, fingerprint: str | None = None) -> Path:
    manifest = manifest_of(len(examples), shard_size)
    if fingerprint:
        manifest.model["fingerprint"] = fingerprint
    for number in range(manifest.num_shards):
        begin = number * shard_size
        part = [(begin + place, example) for place, example in enumerate(examples[begin : begin + shard_size])]
        write_shard(folder / shard_name(number), Shard.of(part, {}), number, manifest.run_id)
    write_manifest(folder, manifest)
    return folder
