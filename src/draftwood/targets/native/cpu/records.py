"""The records of model.h, field by field, and the weight formats of formats.h.

Pointers are plain addresses: the owner of the memory must keep it alive.
"""

from __future__ import annotations

from ctypes import Structure, c_double, c_int64, c_void_p

import torch

FORMATS = {torch.float32: 0, torch.bfloat16: 1}  # storage of a matrix -> index into FORMATS of formats.h
CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1}  # as in model.h


class Matrix(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("joined", c_int64),
        ("format", c_int64),
    )


class Layer(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("o_bias", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", Matrix),
        ("o", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
    )


class Model(Structure):
    _fields_ = (
        ("hidden", c_int64),
        ("inner", c_int64),
        ("layers", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("vocab", c_int64),
        ("window", c_int64),
        ("cache_type", c_int64),
        ("slots", c_int64),
        ("norm_eps", c_double),
        ("layer", c_void_p),
        ("norm", c_void_p),
        ("inverse_frequencies", c_void_p),
        ("embed", Matrix),
        ("head", Matrix),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


class Segment(Structure):
    _fields_ = (
        ("start", c_int64),
        ("base", c_int64),
        ("prefix", c_int64),
        ("first", c_int64),
        ("after", c_int64),
        ("size", c_int64),
        ("wanted", c_int64),
    )


class Batch(Structure):
    _fields_ = (
        ("rows", c_int64),
        ("nodes", c_int64),
        ("segments", c_int64),
        ("taps", c_int64),
        ("wanted", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("parents", c_void_p),
        ("segment", c_void_p),
        ("tap_layers", c_void_p),
        ("logits", c_void_p),
        ("greedy_ids", c_void_p),
        ("tapped", c_void_p),
    )
