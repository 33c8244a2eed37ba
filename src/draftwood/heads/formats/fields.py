"""The fields of config.json that several layouts share: the shape of decoder layers, rotation, taps."""

from __future__ import annotations

from typing import Any

from draftwood.errors import CapabilityError, ModelError
from draftwood.heads.config import HeadConfig, decoder_fields, published_taps
from draftwood.heads.formats.layout import Json
from draftwood.models import ModelConfig, Rope, parse_config

SGLANG_SHIFT = 1  # there id i is the output of layer i, which is the input of layer i + 1
TAP_IDS = "eagle_aux_hidden_state_layer_ids"


def decoder_shape(content: Json) -> ModelConfig:
    """Fields of the Llama family, with the names transformers gives them."""
    try:
        shape = parse_config({**content, "architectures": ["LlamaForCausalLM"]})
    except CapabilityError as error:
        raise CapabilityError("The layers of this head are of a kind that is not supported", got=error.got) from error
    if shape.sliding_window is not None:
        raise CapabilityError("The layers of this head look back only so far, which is not supported")
    return shape


def read_decoder(content: Json, names: set[str]) -> dict[str, Any]:
    """The fields of a HeadConfig that describe its decoder layers. What the file holds counts beside what it says."""

    def holds(ending: str) -> bool:
        return any(name.endswith(ending) for name in names)

    shape = decoder_shape(content)
    return {
        **decoder_fields(shape),
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_layers": shape.num_layers,
        "qkv_bias": shape.qkv_bias or bool(content.get("qkv_bias")) or holds("self_attn.q_proj.bias"),
        "o_bias": shape.o_bias or holds("self_attn.o_proj.bias"),
        "qk_norm": content.get("model_type") == "qwen3" or holds("self_attn.q_norm.weight"),
    }


def write_decoder(config: HeadConfig) -> Json:
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": config.num_layers,
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias and config.o_bias,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling(config.rope),
        "max_position_embeddings": config.context_length,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
    }


def _rope_scaling(rope: Rope) -> Json | None:
    if rope.kind == "default":
        return None
    scaling: Json = {"rope_type": rope.kind, "type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_context,
        }
    return scaling


def eagle_config(content: Json) -> Json:
    """The object that SGLang keeps its own fields in; empty where there is none."""
    nested = content.get("eagle_config")
    return nested if isinstance(nested, dict) else {}


def read_taps(content: Json) -> tuple[int, ...]:
    """Taps in our numbering, whichever engine's key names them; where both do they must agree."""
    outer = _ids(content.get(TAP_IDS))
    inner = tuple(i + SGLANG_SHIFT for i in _ids(eagle_config(content).get(TAP_IDS)))
    if outer and inner and outer != inner:
        raise ModelError(
            "config.json names two different sets of hidden states",
            got=f"{TAP_IDS} {list(outer)}, and in eagle_config those behind layers {[i - SGLANG_SHIFT for i in inner]}",
            allowed="the same ones twice: in eagle_config the numbers are smaller by one",
            next_step="Leave the wrong ones out.",
        )
    return outer or inner


def _ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(entry) is int and entry >= 0 for entry in value):
        raise ModelError(f"config.json has an impossible {TAP_IDS}", got=value, allowed="a list of layers")
    return tuple(value)


def only_published_taps(config: HeadConfig) -> list[str]:
    """The objection of a layout that has no place for taps, unless they are those that it stands for."""
    if not config.taps or config.taps == published_taps(config.target_num_layers):
        return []
    meant = "inputs of the layers 2, half of all, and the third from the end"
    known = "" if config.target_num_layers else "; how many layers its target has is not known, name it with --model"
    return [f"it reads {list(config.taps)}, and only the {meant} are meant where none are named{known}"]


def unordered_taps(config: HeadConfig) -> list[str]:
    """The objection of engines that collect hidden states on the way up: each of them once, the lowest first."""
    if list(config.taps) == sorted(set(config.taps)):
        return []
    return [f"it reads {list(config.taps)}, and these can be read once each, from the lowest up"]


def rope_objections(config: HeadConfig) -> list[str]:
    """Those of the original implementations, which know plain rotation, and linear scaling of the plainest one."""
    rope = config.rope
    if rope.kind == "llama3":
        return ["its rotation is scaled as Llama 3.1's"]
    if rope.kind == "linear" and rope.theta != Rope().theta:
        return ["its rotation is scaled and has a base of its own"]
    return []


def flag_objections(config: HeadConfig, **texts: str) -> list[str]:
    """The texts of those fields that are set."""
    return [text for name, text in texts.items() if getattr(config, name)]


def number(content: Json, key: str, default: int) -> int:
    """A count of config.json whose null means the default."""
    value = content.get(key)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise ModelError(f"config.json has an impossible {key}", got=value, allowed="a whole number, 1 or more")
    return value
