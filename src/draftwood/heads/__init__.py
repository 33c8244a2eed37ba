"""Draft heads: small networks on top of a target's hidden states, their checkpoints, and what fits what."""

from draftwood.heads.base import Head
from draftwood.heads.build import HeadModule, build_head
from draftwood.heads.config import KINDS, HeadConfig, check_fit, default_head_config, usual_taps
from draftwood.heads.eagle import EagleHead
from draftwood.heads.eagle3 import Eagle3Head, FirstLayer
from draftwood.heads.fit import (
    fingerprint,
    fingerprint_if_here,
    identity,
    is_its_target,
    load_fitting,
    native_shape,
    shape_if_here,
    target_shape,
)
from draftwood.heads.formats import FORMATS, LoadedHead, load_head, save_head
from draftwood.heads.hydra import HydraHead
from draftwood.heads.layers import DecoderLayer, RMSNorm, float_logits
from draftwood.heads.medusa import MedusaHead
from draftwood.heads.shipped import ShippedHead, find_head, shipped_for, shipped_heads

__all__ = [
    "FORMATS",
    "KINDS",
    "DecoderLayer",
    "Eagle3Head",
    "EagleHead",
    "FirstLayer",
    "Head",
    "HeadConfig",
    "HeadModule",
    "HydraHead",
    "LoadedHead",
    "MedusaHead",
    "RMSNorm",
    "ShippedHead",
    "build_head",
    "check_fit",
    "default_head_config",
    "find_head",
    "fingerprint",
    "fingerprint_if_here",
    "float_logits",
    "identity",
    "is_its_target",
    "load_fitting",
    "load_head",
    "native_shape",
    "save_head",
    "shape_if_here",
    "shipped_for",
    "shipped_heads",
    "target_shape",
    "usual_taps",
]
