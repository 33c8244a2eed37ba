"""The shape of a model and how its layers compute, read from its ``config.json``.

A new architecture is one row of ``ARCHITECTURES``: it maps the fields of config.json to those of ``LayerStyle`` that
differ from Llama. A style that no decoder implements yet is declined by its ``why_not_native``, never computed wrongly.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from draftwood.errors import CapabilityError, ModelError

Fields = Mapping[str, Any]  # of config.json
MAX_COUNT = 2**31 - 1  # of any count or size
ROPE_KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary position embedding: ``default``, ``linear``, ``llama3``, or ``none`` for layers without positions."""

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """What may differ between the layers of one model."""

    rope: Rope
    sliding_window: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerStyle:
    """How a model computes, apart from its sizes. The defaults are those of Llama."""

    norm: str = "rms"
    norm_eps: float = 1e-6
    activation: str = "silu"  # of the gates
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope: Rope = Rope()
    sliding_window: int | None = None
    layer_kinds: tuple[LayerKind, ...] = ()  # one per layer if layers differ; else all have `rope` and `sliding_window`
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and feed-forward add to the hidden state
    attention_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    logit_scale: float = 1.0

    def layer_kind(self, index: int) -> LayerKind:
        uniform = LayerKind(rope=self.rope, sliding_window=self.sliding_window)
        return self.layer_kinds[index] if self.layer_kinds else uniform

    def list_extras(self) -> list[str]:
        """Lists the features that only the eager decoder implements."""
        found = {
            "layers of different kinds": bool(self.layer_kinds),
            "scaled embeddings or logits": self.scales_ends,
            "scaled residuals": self.residual_scale != 1.0,
            "an attention scale of its own": self.attention_scale is not None,
        }
        return [feature for feature, is_used in found.items() if is_used]

    def why_not_native(self) -> str:
        """Returns why no native decoder computes this style; empty if the eager one does, which implements the most."""
        ropes = {self.rope.kind, *(layer.rope.kind for layer in self.layer_kinds)} - {*ROPE_KINDS, "none"}
        unknown = {
            f"norm {self.norm}": self.norm != "rms",
            f"activation {self.activation}": self.activation != "silu",
            "biases in the feed-forward layers": self.mlp_bias,
            f"rope variant {', '.join(sorted(ropes))}": bool(ropes),
        }
        return "; ".join(feature for feature, is_used in unknown.items() if is_used)

    @property
    def scales_ends(self) -> bool:
        """Whether embeddings or logits are scaled: draft heads, which share them, do not know about that."""
        return (self.embedding_scale, self.logit_scale) != (1.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(LayerStyle):
    """Everything a native decoder needs to know about a model. Sizes are in elements."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def cache_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.num_layers * self.kv_size * itemsize


# How each architecture differs from Llama: fields of LayerStyle, from those of config.json.
ARCHITECTURES: dict[str, Callable[[Fields], dict[str, Any]]] = {
    "LlamaForCausalLM": lambda _: {},
    "MistralForCausalLM": lambda _: {},
    "Qwen2ForCausalLM": lambda _: {"qkv_bias": True},
    "Qwen3ForCausalLM": lambda _: {"qk_norm": True},
}


def is_native(config: Fields) -> bool:
    """Whether a native decoder runs the model of this config.json exactly."""
    return not _list_obstacles(config)


def parse_config(config: Fields, generation: Fields | None = None) -> ModelConfig:
    """Reads config.json and generation_config.json; raises CapabilityError if no native decoder runs the model."""
    obstacles = _list_obstacles(config)
    if obstacles:
        raise CapabilityError(
            "The native decoders cannot run this model",
            got="; ".join(obstacles),
            allowed=ARCHITECTURES,
            next_step="Run it through transformers: set the target to 'hf' (needs the extra 'hf').",
        )
    hidden, heads = read_count(config, "hidden_size"), read_count(config, "num_attention_heads")
    parsed = ModelConfig(
        architecture=architecture_of(config),
        vocab_size=read_count(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=read_count(config, "intermediate_size"),
        num_layers=read_count(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_read_optional(config, "num_key_value_heads", heads),
        head_dim=_read_optional(config, "head_dim", hidden // heads),
        context_length=read_count(config, "max_position_embeddings", 2048),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_read_eos(config, generation or {}),
        **_read_style(config),
    )
    _check_sizes(parsed)
    return parsed


def architecture_of(config: Fields) -> str:
    names = config.get("architectures") or [config.get("model_type") or "unnamed"]
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise _invalid_field("architectures", names, "a list of names")
    return names[0]


def read_count(fields: Fields, key: str, default: int | None = None) -> int:
    """Reads a count or size of config.json: 1 or more."""
    value = fields.get(key, default)
    if key not in fields and default is None:
        raise ModelError(f"config.json lacks {key!r}", next_step="Fetch the model again.")
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 1 <= value <= MAX_COUNT or value != value // 1:
        raise _invalid_field(key, value, f"a whole number, 1 to {MAX_COUNT}")
    return int(value)


def read_positive(fields: Fields, key: str, default: float) -> float:
    value = fields.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise _invalid_field(key, value, "a number above 0")
    return float(value)


def _read_optional(fields: Fields, key: str, default: int) -> int:
    """Reads a count that may be null, which means the default."""
    return default if fields.get(key) is None else read_count(fields, key)


def _invalid_field(key: str, value: object, allowed: str) -> ModelError:
    return ModelError(
        f"config.json has an invalid {key}",
        got=json.dumps(value, default=repr)[:80],
        allowed=allowed,
        next_step="Fetch the model again.",
    )


def _check_sizes(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        heads = f"a divisor of num_attention_heads, {config.num_heads}"
        raise _invalid_field("num_key_value_heads", config.num_kv_heads, heads)
    if config.head_dim % 2 or not config.head_dim:
        raise _invalid_field("head_dim (or hidden_size / num_attention_heads)", config.head_dim, "an even number")
    if len(config.layer_kinds) not in (0, config.num_layers):
        raise _invalid_field("layer_types", len(config.layer_kinds), f"{config.num_layers} entries, one per layer")


def _list_obstacles(config: Fields) -> list[str]:
    architecture = architecture_of(config)
    if architecture not in ARCHITECTURES:
        return [f"architecture {architecture}"]  # the meaning of its other fields is unknown
    found = ["weights quantised by another library"] if config.get("quantization_config") else []
    other_types = set(_read_layer_types(config)) - {"full_attention", "sliding_attention"}
    found += [f"layers of type {name}" for name in sorted(map(str, other_types))]
    why = "" if other_types else LayerStyle(**_read_style(config)).why_not_native()
    return found + ([why] if why else [])


def _read_style(config: Fields) -> dict[str, Any]:
    """Reads the fields of ``LayerStyle``."""
    attention_bias = bool(config.get("attention_bias", False))
    rope = _read_rope(config)
    windows = _read_windows(config)
    style = {
        "norm_eps": read_positive(config, "rms_norm_eps", 1e-6),
        "activation": config.get("hidden_act", "silu"),
        "qkv_bias": attention_bias,
        "o_bias": attention_bias,
        "mlp_bias": bool(config.get("mlp_bias")),
        "rope": rope,
        "sliding_window": next((window for window in windows if window), None),
    }
    if len(set(windows)) > 1:
        style["layer_kinds"] = tuple(LayerKind(rope=rope, sliding_window=window) for window in windows)
    return style | ARCHITECTURES[architecture_of(config)](config)


def _read_rope(config: Fields) -> Rope:
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    fields = config.get(name) or {}
    if not isinstance(fields, Mapping):
        raise _invalid_field(name, fields, "an object")
    kind = str(fields.get("rope_type") or fields.get("type") or "default")
    if kind not in ROPE_KINDS:
        return Rope(kind=kind)  # the meaning of its other fields is unknown
    holder = fields if fields.get("rope_theta") else config if config.get("rope_theta") else {}
    return Rope(
        kind=kind,
        theta=read_positive(holder, "rope_theta", 10_000.0),
        factor=read_positive(fields, "factor", 1.0),
        low_freq_factor=read_positive(fields, "low_freq_factor", 1.0),
        high_freq_factor=read_positive(fields, "high_freq_factor", 4.0),
        original_context=read_count(fields, "original_max_position_embeddings", 8192),
    )


def _read_windows(config: Fields) -> list[int | None]:
    """Reads the sliding window of every layer, or one for all of them."""
    if not config.get("sliding_window") or not config.get("use_sliding_window", True):
        return [None]
    window = read_count(config, "sliding_window")
    types = _read_layer_types(config)
    return [window if name == "sliding_attention" else None for name in types] or [window]


def _read_layer_types(config: Fields) -> list[str]:
    types = config.get("layer_types") or []
    if not isinstance(types, list):
        raise _invalid_field("layer_types", types, "a list of names")
    return types


def _read_eos(config: Fields, generation: Fields) -> tuple[int, ...]:
    found: list[int] = []
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if token is not None and type(token) is not int:
                raise _invalid_field("eos_token_id", value, "a token id or a list of them")
            if token is not None and token not in found:
                found.append(token)
    return tuple(found)
