"""Translates the metadata of a GGUF file to a Hugging Face ``config.json``."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from draftwood.errors import ModelError
from draftwood.models.gguf.dequantize import Floats
from draftwood.models.gguf.reader import GgufFile
from draftwood.models.gguf.tokenizer import ending_ids, special_id, vocabulary_of


class Architecture(NamedTuple):
    model_type: str
    name: str  # its class in transformers
    permuted: bool  # rows of the query and key projections are in the order of interleaved rotation


# Mistral's files have the architecture "llama".
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", permuted=False),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", permuted=False),
}

# Llama 3.1 and later stretch slow rotations by a factor that differs between models; these are always the same.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(
            "GGUF files of this architecture cannot be converted",
            got=name,
            allowed=ARCHITECTURES,
            next_step="Use the model's own folder (safetensors) instead of the GGUF file.",
        )
    return ARCHITECTURES[name]


def config_of(file: GgufFile) -> dict[str, Any]:
    """Builds the content of ``config.json``."""
    metadata, architecture = file.metadata, architecture_of(file.metadata)
    _refuse_variants(metadata)
    hidden, heads = _whole(metadata, "embedding_length"), _whole(metadata, "attention.head_count")
    head_dim = _whole(metadata, "attention.key_length", max(1, hidden // heads))
    config: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "vocab_size": _vocabulary_size(file),
        "hidden_size": hidden,
        "intermediate_size": _whole(metadata, "feed_forward_length"),
        "num_hidden_layers": _num_layers(file),
        "num_attention_heads": heads,
        "num_key_value_heads": _whole(metadata, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(metadata, "attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": _whole(metadata, "context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "use_cache": True,
        # The dtype to run in, not that of the stored weights: these families were trained in bfloat16, and the
        # activations of some overflow float16.
        "dtype": "bfloat16",
        # Without a version, transformers warns about the tokenizers of other models.
        "transformers_version": "5.16.0",
    }
    config |= _rope(file, head_dim)
    if architecture.model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    return config | _token_ids(metadata)


def generation_config_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Builds the content of ``generation_config.json``."""
    return _token_ids(metadata)


def _token_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    ending = ending_ids(metadata)
    ids: dict[str, Any] = {"bos_token_id": special_id(metadata, "bos"), "pad_token_id": special_id(metadata, "padding")}
    if ending:
        ids["eos_token_id"] = ending if len(ending) > 1 else ending[0]
    return {key: value for key, value in ids.items() if value is not None}


def _refuse_variants(metadata: Mapping[str, Any]) -> None:
    """Refuses variants of a known architecture that cannot be converted."""
    if metadata.get(_key(metadata, "expert_count")):
        raise ModelError("Mixture-of-experts models cannot be converted", got=metadata.get("general.name"))
    if metadata.get("split.count", 0) not in (0, 1):
        raise ModelError(
            "This GGUF file is one part of several",
            got=f"split.count {metadata['split.count']}",
            next_step="Join the parts into one file first (llama.cpp's gguf-split --merge does).",
        )


def _num_layers(file: GgufFile) -> int:
    count = _whole(file.metadata, "block_count")
    if count > len(file.tensors):
        raise ModelError(f"{file.path} claims more layers than it has tensors", got=count, next_step="Fetch it again.")
    return count


def _vocabulary_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} has no embedding matrix", next_step="Fetch the file again.")
    rows, tokens = embedding.shape[0], len(vocabulary_of(file.metadata)[0])
    if tokens > rows:
        raise ModelError(f"{file.path} has more tokens than embeddings", got=f"{tokens} tokens, {rows} rows")
    return rows


def _rope(file: GgufFile, head_dim: int) -> dict[str, Any]:
    metadata = file.metadata
    theta = _decimal(metadata, "rope.freq_base", 10_000.0)
    rotated = metadata.get(_key(metadata, "rope.dimension_count"), head_dim)
    if rotated != head_dim:
        raise ModelError("Partial rotary embeddings cannot be converted", got=f"{rotated} of {head_dim} dimensions")
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    kind = metadata.get(_key(metadata, "rope.scaling.type"), "none")
    if kind == "linear":
        parameters |= {"rope_type": "linear", "factor": _decimal(metadata, "rope.scaling.factor", 1.0)}
    elif kind != "none":
        raise ModelError("This kind of RoPE scaling cannot be converted", got=kind, allowed=("none", "linear"))
    factors = file.tensors.get("rope_freqs.weight")
    if factors is not None:
        parameters |= _llama3_rope(file.floats(factors), theta, head_dim)
    return {"rope_theta": theta, "rope_parameters": parameters}


def _llama3_rope(factors: Floats, theta: float, head_dim: int) -> dict[str, Any]:
    """Recovers the parameters from the divisor of each frequency, which GGUF stores, and verifies them."""
    factor = float(factors.max())
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3_CONTEXT * frequencies / (2 * math.pi)
    smooth = np.clip((turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise ModelError("The file's RoPE frequency factors are not those of Llama 3", got=f"up to {factor:g}")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _key(metadata: Mapping[str, Any], name: str) -> str:
    return f"{metadata['general.architecture']}.{name}"


def _whole(metadata: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = metadata.get(_key(metadata, name), default)
    if not isinstance(value, int) or value < 1:  # a list: layers of different shapes
        raise ModelError(f"The GGUF file's {_key(metadata, name)} must be a whole number above 0", got=value)
    return value


def _decimal(metadata: Mapping[str, Any], name: str, default: float) -> float:
    """Reads a float32 as the shortest decimal that rounds to it: 1e-05, not 9.999999747378752e-06."""
    value = metadata.get(_key(metadata, name), default)
    if not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ModelError(f"The GGUF file's {_key(metadata, name)} must be a number above 0", got=value)
    return float(str(np.float32(value)))
