"""Converts a GGUF file to a folder in Hugging Face layout, which native decoders and transformers read.

The folder holds config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from draftwood.display import duration, readable_size
from draftwood.models.config import parse_config
from draftwood.models.gguf.config import architecture_of, config_of, generation_config_of
from draftwood.models.gguf.dequantize import Floats
from draftwood.models.gguf.names import permuted_heads, plan_tensors, unpermute
from draftwood.models.gguf.reader import GgufFile, TensorEntry
from draftwood.models.gguf.safetensors_file import SafetensorsWriter
from draftwood.models.gguf.tokenizer import save_tokenizer, tokenizer_config, vocabulary_of

# Increase it whenever the output for the same GGUF file changes: older folders in the cache are converted again.
CONVERTER_VERSION = 2

_CONVERTED_PER_SECOND = 60e6  # bytes written, on one slow core
_PIECE = 1 << 22  # weights held in memory as float32 at a time


def convert(file: GgufFile, folder: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Writes all files into an existing ``folder``. ``progress`` receives the bytes written and the total."""
    write_description(file, folder)
    write_weights(file, folder / "model.safetensors", progress)


def write_description(file: GgufFile, folder: Path) -> None:
    """Writes all files but the weights, after a check of the names and shapes of all tensors."""
    config = config_of(file)
    plan_tensors(file, parse_config(config))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config_of(file.metadata))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(file.metadata))
    save_tokenizer(file.metadata, folder)


def description_size(file: GgufFile) -> int:
    """Estimates the size in bytes of what ``write_description`` writes."""
    return 64 * len(vocabulary_of(file.metadata)[0]) + (1 << 20)


def converted_size(file: GgufFile) -> int:
    """Estimates the size of the folder in bytes."""
    return sum(_planned_bytes(entry) for entry in file.tensors.values()) + description_size(file)


def describe_conversion(file: GgufFile) -> str:
    """What is about to happen, and what it takes."""
    size = converted_size(file)
    return f"converting the model, {readable_size(size)} on disk, about {duration(size / _CONVERTED_PER_SECOND)}"


def write_weights(file: GgufFile, path: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Writes the weights as safetensors, expanded to 16 or 32 bits."""
    config, architecture = parse_config(config_of(file)), architecture_of(file.metadata)
    plan = plan_tensors(file, config)
    writer = SafetensorsWriter(path, {name: (_storage(entry), entry.shape) for name, entry in plan.items()})
    done = 0
    try:
        for name, entry in plan.items():
            heads = permuted_heads(entry.name, architecture, config.num_heads, config.num_kv_heads)
            _write_tensor(file, entry, writer, name, heads)
            done += _planned_bytes(entry)
            if progress is not None:
                progress(done, writer.num_bytes)
        file.check_unchanged()
        writer.finish()
    finally:
        writer.close()


def _storage(entry: TensorEntry) -> str:
    """Returns the dtype a tensor is stored in: its own if it is not quantised, else float16.

    A quantised weight is a float16 scale times an integer of up to 8 bits (plus a float16 minimum). Float16 keeps 11
    bits of the product, bfloat16 only 8: the error is an eighth as large, far below that of the quantisation.
    Loading casts to the dtype of the run.
    """
    return entry.format_name if entry.format_name in ("F32", "F16", "BF16") else "F16"


def _planned_bytes(entry: TensorEntry) -> int:
    return int(np.prod(entry.shape)) * (4 if _storage(entry) == "F32" else 2)


def _write_tensor(file: GgufFile, entry: TensorEntry, writer: SafetensorsWriter, name: str, heads: int) -> None:
    dtype = _storage(entry)
    writer.begin(name, dtype)
    for piece in _pieces(file, entry, heads):
        if dtype == "F16" and np.abs(piece).max() > np.finfo(np.float16).max:
            break
        writer.write(_encode(piece, dtype))
    else:
        return
    # Too large for float16 (never seen in a real model): write it again as bfloat16, which has the same size.
    writer.begin(name, "BF16")
    for piece in _pieces(file, entry, heads):
        writer.write(_encode(piece, "BF16"))


def _pieces(file: GgufFile, entry: TensorEntry, heads: int) -> Iterator[Floats]:
    """Yields the tensor in groups of rows; one that must be reordered comes in one piece."""
    rows = entry.shape[0]
    step = rows if heads else max(1, _PIECE * rows // int(np.prod(entry.shape)))
    for first in range(0, rows, step):
        piece = file.finite_floats(entry, first, min(step, rows - first))
        yield unpermute(piece, heads) if heads else piece


def _encode(values: Floats, dtype: str) -> bytes:
    if dtype == "F32":
        return values.tobytes()
    if dtype == "F16":
        return values.astype(np.float16).tobytes()
    bits = values.view(np.uint32)
    # The upper half, rounded to nearest with ties to even.
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
