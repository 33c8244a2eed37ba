"""The shape of a Llama-family model, read from its ``config.json``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftwood.errors import CapabilityError, ModelError

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """How positions turn queries and keys: ``default``, ``linear`` or ``llama3``."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything the native decoder needs to know. Counts are ``num_*``; sizes are in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context_length: int
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def cache_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.num_layers * self.kv_size * itemsize


def is_native(config: Mapping[str, Any]) -> bool:
    """Whether the native decoder runs this model exactly."""
    return not _obstacles(config)


def parse_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Reads a Hugging Face configuration; refuses what the native decoder would compute wrongly."""
    obstacles = _obstacles(config)
    if obstacles:
        raise CapabilityError(
            "The native target cannot run this model",
            got="; ".join(obstacles),
            allowed=ARCHITECTURES,
            next_step="Use target='hf' (needs the extra 'hf') to run it through transformers.",
        )
    architecture = architecture_of(config)
    hidden, heads = whole_number(config, "hidden_size"), whole_number(config, "num_attention_heads")
    attention_bias = bool(config.get("attention_bias", False))
    return _consistent(
        ModelConfig(
            architecture=architecture,
            vocab_size=whole_number(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=whole_number(config, "intermediate_size"),
            num_layers=whole_number(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_given(config, "num_key_value_heads", heads),
            head_dim=_given(config, "head_dim", hidden // heads),
            norm_eps=_positive(config, "rms_norm_eps", 1e-6),
            context_length=whole_number(config, "max_position_embeddings", 2048),
            rope=_rope(config),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            o_bias=attention_bias,
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=_window(config),
            eos_token_ids=_eos(config, generation or {}),
        )
    )


def architecture_of(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or [config.get("model_type") or "unnamed"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise _odd_field("architectures", names, "a list of names")
    return names[0]


def whole_number(fields: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A count or size of config.json: 1 or more."""
    value = fields.get(key, default)
    if key not in fields and default is None:
        raise ModelError(f"config.json lacks {key!r}", next_step="Fetch the model again.")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value // 1 or value < 1:
        raise _odd_field(key, value, "a whole number, 1 or more")
    return int(value)


def _given(fields: Mapping[str, Any], key: str, default: int) -> int:
    """As ``whole_number``, for fields whose null means that they follow from others."""
    return default if fields.get(key) is None else whole_number(fields, key)


def _positive(fields: Mapping[str, Any], key: str, default: float) -> float:
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise _odd_field(key, value, "a number above 0")
    return float(value)


def _odd_field(key: str, value: object, allowed: str) -> ModelError:
    return ModelError(
        f"config.json has an impossible {key}",
        got=json.dumps(value, default=repr)[:80],
        allowed=allowed,
        next_step="Fetch the model again.",
    )


def _consistent(config: ModelConfig) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        heads = f"a divisor of num_attention_heads, {config.num_heads}"
        raise _odd_field("num_key_value_heads", config.num_kv_heads, heads)
    if config.head_dim % 2 or not config.head_dim:
        raise _odd_field("head_dim (or hidden_size / num_attention_heads)", config.head_dim, "an even number above 0")
    return config


def _obstacles(config: Mapping[str, Any]) -> list[str]:
    architecture = architecture_of(config)
    if architecture not in ARCHITECTURES:
        return [f"architecture {architecture}"]  # what its other fields mean is not known here
    found = []
    if config.get("hidden_act", "silu") != "silu":
        found.append(f"activation {config['hidden_act']}")
    if config.get("mlp_bias"):
        found.append("biases in the feed-forward layers")
    if config.get("quantization_config"):
        found.append("weights quantised by another library")
    kind = _rope_fields(config)[0]
    if kind not in ("default", "linear", "llama3"):
        found.append(f"rope variant {kind}")
    layer_types = config.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise _odd_field("layer_types", layer_types, "a list of names")
    if any(layer_type != "full_attention" for layer_type in layer_types):
        found.append("layers of several kinds")
    return found


def _rope_fields(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    fields = config.get(name) or {}
    if not isinstance(fields, Mapping):
        raise _odd_field(name, fields, "an object")
    return fields.get("rope_type") or fields.get("type") or "default", fields


def _rope(config: Mapping[str, Any]) -> Rope:
    kind, fields = _rope_fields(config)
    holder = fields if fields.get("rope_theta") else config if config.get("rope_theta") else {}
    return Rope(
        kind=kind,
        theta=_positive(holder, "rope_theta", 10_000.0),
        factor=_positive(fields, "factor", 1.0),
        low_freq_factor=_positive(fields, "low_freq_factor", 1.0),
        high_freq_factor=_positive(fields, "high_freq_factor", 4.0),
        original_context=whole_number(fields, "original_max_position_embeddings", 8192),
    )


def _window(config: Mapping[str, Any]) -> int | None:
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        return None
    return whole_number(config, "sliding_window")


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    found: list[int] = []
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if token is not None and type(token) is not int:
                raise _odd_field("eos_token_id", value, "a token id or a list of them")
            if token is not None and token not in found:
                found.append(token)
    return tuple(found)
