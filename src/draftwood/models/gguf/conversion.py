"""Converts a GGUF file to a folder in Hugging Face layout, which native decoders and transformers read.

The folder holds config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from draftwood.display import duration, readable_size
from draftwood.errors import ModelError
from draftwood.models.config import ModelConfig, parse_config
from draftwood.models.gguf.config import Architecture, architecture_of, config_of, generation_config_of
from draftwood.models.gguf.dequantize import Floats
from draftwood.models.gguf.reader import GgufFile, TensorEntry
from draftwood.models.gguf.safetensors_file import SafetensorsWriter
from draftwood.models.gguf.tokenizer import save_tokenizer, tokenizer_config, vocabulary_of
from draftwood.models.tensors import tensor_shapes

# Increase it whenever the output for the same GGUF file changes: older folders in the cache are converted again.
CONVERTER_VERSION = 1

_TOP = {"token_embd.weight": "model.embed_tokens", "output_norm.weight": "model.norm", "output.weight": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_COMPUTED = ("rope_freqs.weight",)  # contained in config.json
_CONVERTED_PER_SECOND = 60e6  # bytes written, on one slow core
_PIECE = 1 << 22  # weights held in memory as float32 at a time


def convert(file: GgufFile, folder: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Writes all files into an existing ``folder``. ``progress`` receives the bytes written and the total."""
    config = config_of(file)
    plan = _plan(file, parse_config(config))
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config_of(file.metadata))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(file.metadata))
    save_tokenizer(file.metadata, folder)
    _write_weights(file, plan, config, folder / "model.safetensors", progress)


def converted_size(file: GgufFile) -> int:
    """Estimates the size of the folder in bytes."""
    weights = sum(_planned_bytes(entry) for entry in file.tensors.values())
    return weights + 64 * len(vocabulary_of(file.metadata)[0]) + (1 << 20)


def describe_conversion(file: GgufFile) -> str:
    """What is about to happen, and what it takes."""
    size = converted_size(file)
    return f"converting the model, {readable_size(size)} on disk, about {duration(size / _CONVERTED_PER_SECOND)}"


def hf_name(name: str) -> str | None:
    """Returns the Hugging Face name of a tensor, or None."""
    if name in _TOP:
        return f"{_TOP[name]}.weight"
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        return None
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def _plan(file: GgufFile, config: ModelConfig) -> dict[str, TensorEntry]:
    """Maps the new name of every tensor to its entry, and checks names and shapes against the configuration."""
    named = {hf_name(name) or name: entry for name, entry in file.tensors.items() if name not in _COMPUTED}
    wanted = tensor_shapes(config)
    for label, group in (("lacks", wanted.keys() - named.keys()), ("has unknown", named.keys() - wanted.keys())):
        if group:
            raise ModelError(f"{file.path} {label} tensors", got=", ".join(sorted(group)[:6]))
    for name, shape in wanted.items():
        if named[name].shape != shape:
            raise ModelError(
                f"{file.path}: the tensor {named[name].name} does not fit the metadata",
                got=list(named[name].shape),
                allowed=[list(shape)],
            )
    return {name: named[name] for name in wanted}


def _write_weights(
    file: GgufFile,
    plan: Mapping[str, TensorEntry],
    config: Mapping[str, Any],
    path: Path,
    progress: Callable[[int, int], None] | None,
) -> None:
    writer = SafetensorsWriter(path, {name: (_storage(entry), entry.shape) for name, entry in plan.items()})
    done = 0
    try:
        for name, entry in plan.items():
            heads = _permuted_heads(entry.name, architecture_of(file.metadata), config)
            _write_tensor(file, entry, writer, name, heads)
            done += _planned_bytes(entry)
            if progress is not None:
                progress(done, writer.num_bytes)
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
        piece = file.floats(entry, first, min(step, rows - first))
        if not np.isfinite(piece).all():
            raise ModelError(
                f"{file.path}: the tensor {entry.name} contains values that are not finite",
                next_step="The file is damaged. Fetch it again.",
            )
        yield _unpermute(piece, heads) if heads else piece


def _permuted_heads(gguf_name: str, architecture: Architecture, config: Mapping[str, Any]) -> int:
    """Returns the number of heads whose rows must be reordered, or 0."""
    kind = gguf_name.split(".")[-2]
    if not architecture.permuted or kind not in ("attn_q", "attn_k"):
        return 0
    return int(config["num_attention_heads" if kind == "attn_q" else "num_key_value_heads"])


def _unpermute(rows: Floats, heads: int) -> Floats:
    """Reorders rows: GGUF rotates neighbouring rows of a head, Hugging Face row i with row i + half."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


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
