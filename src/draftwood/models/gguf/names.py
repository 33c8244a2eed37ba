"""Names and places of tensors: GGUF on one side, Hugging Face on the other."""

import re

import numpy as np

from draftwood.errors import ModelError
from draftwood.models.config import ModelConfig
from draftwood.models.gguf.config import Architecture
from draftwood.models.gguf.dequantize import Array
from draftwood.models.gguf.reader import GgufFile, TensorEntry
from draftwood.models.tensors import tensor_shapes

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


def hf_name(name: str) -> str | None:
    """Returns the Hugging Face name of a tensor, or None."""
    if name in _TOP:
        return f"{_TOP[name]}.weight"
    match = _LAYER_NAME.fullmatch(name)
    if match is None or match[2] not in _IN_LAYER:
        return None
    return f"model.layers.{match[1]}.{_IN_LAYER[match[2]]}.{match[3]}"


def plan_tensors(file: GgufFile, config: ModelConfig) -> dict[str, TensorEntry]:
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


def permuted_heads(gguf_name: str, architecture: Architecture, num_heads: int, num_kv_heads: int) -> int:
    """Returns the number of heads whose rows must be reordered, or 0."""
    kind = gguf_name.split(".")[-2]
    if not architecture.permuted:
        return 0
    return {"attn_q": num_heads, "attn_k": num_kv_heads}.get(kind, 0)


def unpermute(rows: Array, heads: int) -> Array:
    """Reorders rows: GGUF rotates neighbouring rows of a head, Hugging Face row i with row i + half."""
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
