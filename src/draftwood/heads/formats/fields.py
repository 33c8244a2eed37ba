"""Fields of config.json, and objections, that several layouts share: decoder layers, rotation, taps, flags."""

from typing import Any

from draftwood.errors import CapabilityError, ModelError
from draftwood.heads.config import HeadConfig, decoder_fields, published_taps
from draftwood.heads.formats.layout import Json
from draftwood.models import ModelConfig, Rope, parse_config
from draftwood.models import read_count as read_model_count

SGLANG_SHIFT = 1  # in SGLang, id i is the output of layer i, which is the input of layer i + 1
TAP_IDS = "eagle_aux_hidden_state_layer_ids"
_FLAG_OBJECTIONS = {
    "qkv_bias": "its projections to queries, keys and values have biases",
    "o_bias": "its attention has an output bias",
    "qk_norm": "it norms queries and keys",
    "fc_bias": "its fc has a bias",
    "norm_before_fc": "it norms its taps (norm_before_fc)",
    "fc_norm": "it norms each of its taps (fc_norm)",
    "norm_before_residual": "its residual is normed (norm_before_residual)",
    "norm_output": "its output is normed before it is fed back (norm_output)",
}


def _decoder_shape(content: Json) -> ModelConfig:
    """Parse the fields of a Llama model, under the names that transformers uses."""
    try:
        shape = parse_config({**content, "architectures": ["LlamaForCausalLM"]})
    except CapabilityError as error:
        raise CapabilityError("The layers of this head are not supported", got=error.got) from error
    if shape.sliding_window is not None:
        raise CapabilityError("The layers of this head have a sliding window, which is not supported")
    return shape


def read_decoder(content: Json, names: set[str]) -> dict[str, Any]:
    """The fields of a HeadConfig for its decoder layers. Tensors in the file count as much as flags in config.json."""

    def holds(ending: str) -> bool:
        return any(name.endswith(ending) for name in names)

    shape = _decoder_shape(content)
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
    """Taps in our numbering, from either engine's key. If both keys are there they must agree."""
    outer = _read_ids(content.get(TAP_IDS))
    inner = tuple(i + SGLANG_SHIFT for i in _read_ids(eagle_config(content).get(TAP_IDS)))
    if outer and inner and outer != inner:
        raise ModelError(
            "config.json names two different sets of hidden states",
            got=f"{TAP_IDS} {list(outer)}, in eagle_config {[i - SGLANG_SHIFT for i in inner]}",
            allowed="the same ones: the ids in eagle_config are smaller by one",
            next_step="Remove the wrong ones.",
        )
    return outer or inner


def _read_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(type(entry) is int and entry >= 0 for entry in value):
        raise ModelError(f"config.json has an invalid {TAP_IDS}", got=value, allowed="a list of layers")
    return tuple(value)


def published_tap_objections(config: HeadConfig) -> list[str]:
    """The objection of a layout that cannot store taps, unless they are the published ones that it implies."""
    if not config.taps or config.taps == published_taps(config.target_num_layers):
        return []
    implied = "the inputs of layer 2, the middle layer and the third from the end"
    known = "" if config.target_num_layers else "; the target's number of layers is not known, name it with --model"
    return [f"it reads {list(config.taps)}, and the layout implies {implied}{known}"]


def tap_order_objections(config: HeadConfig) -> list[str]:
    """The objection of engines that collect hidden states layer by layer: each once, in ascending order."""
    if list(config.taps) == sorted(set(config.taps)):
        return []
    return [f"it reads {list(config.taps)}, and the engine reads each tap once, in ascending order"]


def rope_objections(config: HeadConfig) -> list[str]:
    """The objections of the original implementations: they support rope without scaling, with any theta, and linear
    scaling with the default theta."""
    rope = config.rope
    if rope.kind == "llama3":
        return ["its rope is scaled as in Llama 3.1"]
    if rope.kind == "linear" and rope.theta != Rope().theta:
        return ["its rope is scaled and has its own theta"]
    return []


def feature_objections(config: HeadConfig) -> list[str]:
    """The objection of the original implementations, which read the hidden state after the final norm."""
    return [] if config.feature == "normed" else ["it reads the target's last state before the final norm"]


def bias_objections(config: HeadConfig) -> list[str]:
    """The objection of layouts with one flag for all attention biases."""
    return ["its attention has some biases and lacks others"] if config.qkv_bias != config.o_bias else []


def flag_objections(config: HeadConfig, *names: str) -> list[str]:
    """The objections of a layout that does not support these fields."""
    return [_FLAG_OBJECTIONS[name] for name in names if getattr(config, name)]


def read_count(content: Json, key: str, default: int) -> int:
    """Read a count from config.json, where null means the default."""
    value = content.get(key)
    if value is None:
        return default
    return read_model_count(content, key)
