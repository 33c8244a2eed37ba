"""The shape of a Llama-family model, read from its ``config.json``."""

from __future__ import annotations

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
    architecture = config["architectures"][0]
    try:
        hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        attention_bias = bool(config.get("attention_bias", False))
        return ModelConfig(
            architecture=architecture,
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            context_length=int(config.get("max_position_embeddings", 2048)),
            rope=_rope(config),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            o_bias=attention_bias,
            qk_norm=architecture == "Qwen3ForCausalLM",
            sliding_window=_window(config),
            eos_token_ids=_eos(config, generation or {}),
        )
    except KeyError as missing:
        raise ModelError(f"config.json lacks {missing}", next_step="Fetch the model again.") from missing


def _obstacles(config: Mapping[str, Any]) -> list[str]:
    found = []
    architecture = (config.get("architectures") or ["unnamed"])[0]
    if architecture not in ARCHITECTURES:
        found.append(f"architecture {architecture}")
    if config.get("hidden_act", "silu") != "silu":
        found.append(f"activation {config['hidden_act']}")
    if config.get("mlp_bias"):
        found.append("biases in the feed-forward layers")
    if config.get("quantization_config"):
        found.append("weights quantised by another library")
    kind = _rope_fields(config)[0]
    if kind not in ("default", "linear", "llama3"):
        found.append(f"rope variant {kind}")
    if set(config.get("layer_types") or ()) - {"full_attention"}:
        found.append("layers of several kinds")
    return found


def _rope_fields(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    fields = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return fields.get("rope_type") or fields.get("type") or "default", fields


def _rope(config: Mapping[str, Any]) -> Rope:
    kind, fields = _rope_fields(config)
    theta = fields.get("rope_theta") or config.get("rope_theta") or 10_000.0
    return Rope(
        kind=kind,
        theta=float(theta),
        factor=float(fields.get("factor", 1.0)),
        low_freq_factor=float(fields.get("low_freq_factor", 1.0)),
        high_freq_factor=float(fields.get("high_freq_factor", 4.0)),
        original_context=int(fields.get("original_max_position_embeddings", 8192)),
    )


def _window(config: Mapping[str, Any]) -> int | None:
    window = config.get("sliding_window")
    return int(window) if window and config.get("use_sliding_window", True) else None


def _eos(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    found: list[int] = []
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if token is not None and int(token) not in found:
                found.append(int(token))
    return tuple(found)
