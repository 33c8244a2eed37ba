"""Draft heads: small networks that read a target's hidden states, their checkpoints, and which target they fit."""

from draftwood.heads.base import Head
from draftwood.heads.build import HeadModule, build_head
from draftwood.heads.config import KINDS, HeadConfig, default_head_config
from draftwood.heads.eagle import EagleHead
from draftwood.heads.eagle3 import Eagle3Head, FirstLayer
from draftwood.heads.fit import check_fit, load_head_for, was_trained_for
from draftwood.heads.formats import FORMATS, load_head, save_head
from draftwood.heads.grow import GROWS, grow_head
from draftwood.heads.hydra import HydraHead
from draftwood.heads.layers import DecoderLayer, RMSNorm, float_logits
from draftwood.heads.medusa import MedusaHead
from draftwood.heads.shipped import ShippedHead, any_head_fits, find_head, find_shipped_head, list_shipped_heads
from draftwood.heads.target import (
    find_local_fingerprint,
    find_local_shape,
    fingerprint,
    identify_target,
    load_target_shape,
    native_config,
)
