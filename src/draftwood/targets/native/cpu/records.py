"""The records of model.h, field by field, and the weight formats of formats.h.

Pointers are plain addresses: the owner of the memory must keep it alive.
"""

from ctypes import Structure, c_double, c_int64, c_void_p

import torch

# As in FORMATS of formats.h: by name in GGUF files.
_FORMAT_NAMES = (
    "F32", "BF16", "F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"
)  # fmt: skip
FORMATS = {name: index for index, name in enumerate(_FORMAT_NAMES)}
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1}  # as in model.h


def _numbers(*names: str) -> list[tuple[str, type[c_int64]]]:
    return [(name, c_int64) for name in names]


def _pointers(*names: str) -> list[tuple[str, type[c_void_p]]]:
    return [(name, c_void_p) for name in names]


class Matrix(Structure):
    _fields_ = (*_pointers("data"), *_numbers("outputs", "inputs", "joined", "format"))


class Layer(Structure):
    _fields_ = (
        *_pointers("input_norm", "post_norm", "qkv_bias", "o_bias", "q_norm", "k_norm"),
        ("qkv", Matrix * 3),
        ("o", Matrix),
        ("gate_up", Matrix * 2),
        ("down", Matrix),
    )


class Model(Structure):
    _fields_ = (
        *_numbers("hidden", "inner", "layers", "heads", "kv_heads", "head_dim", "vocab", "tokens"),
        *_numbers("window", "cache_type", "slots"),
        ("norm_eps", c_double),
        *_pointers("layer", "norm", "inverse_frequencies"),
        ("embed", Matrix),
        *_numbers("embed_packed"),
        ("head", Matrix),
        *_pointers("keys", "values", "feature_norm"),
        *_numbers("norm_before_residual"),
        ("fuse", Matrix),
        *_pointers("fuse_bias"),
    )


class Batch(Structure):
    _fields_ = (
        *_numbers("rows", "nodes", "segments", "taps", "wanted", "top_k"),
        *_pointers("token_ids", "parents", "segment", "tap_layers"),
        *_pointers("logits", "greedy_ids", "top", "tapped", "features", "given"),
        *_numbers("draws"),
        *_pointers("draw", "drawn"),
    )
