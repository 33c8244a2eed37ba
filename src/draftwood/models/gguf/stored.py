"""The tensors of a GGUF file in the blocks they are stored in, under their Hugging Face names."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from draftwood.models.config import ModelConfig
from draftwood.models.gguf.config import architecture_of
from draftwood.models.gguf.dequantize import Bytes, Floats
from draftwood.models.gguf.names import permuted_heads, plan_tensors, unpermute
from draftwood.models.gguf.reader import GgufFile, TensorEntry


class StoredTensor(NamedTuple):
    """A tensor in the file; its values are read on demand, while the file is open."""

    format: str  # Q4_K, F32, ...
    shape: tuple[int, ...]
    read: Callable[[], Bytes]  # [rows, bytes of a row]
    floats: Callable[[], Floats]  # the values in float32


def stored_tensors(file: GgufFile, config: ModelConfig) -> dict[str, StoredTensor]:
    """Returns every tensor of the configuration by its Hugging Face name."""
    architecture = architecture_of(file.metadata)
    tensors = {}
    for name, entry in plan_tensors(file, config).items():
        heads = permuted_heads(entry.name, architecture, config.num_heads, config.num_kv_heads)
        tensors[name] = StoredTensor(
            entry.format_name, entry.shape, partial(_read, file, entry, heads), partial(_floats, file, entry, heads)
        )
    return tensors


def _read(file: GgufFile, entry: TensorEntry, heads: int) -> Bytes:
    rows = file.read(entry)
    return unpermute(rows, heads) if heads else rows


def _floats(file: GgufFile, entry: TensorEntry, heads: int) -> Floats:
    values = file.finite_floats(entry)
    return unpermute(values, heads) if heads else np.ascontiguousarray(values)
