"""Draft heads: small networks on top of a target's hidden states, their checkpoints, and what fits what."""

from draftwood.heads.base import Head
from draftwood.heads.build import HeadModule, build_head
from draftwood.heads.config import KINDS, HeadConfig, check_fit, default_head_config, usual_taps
from draftwood.heads.eagle import EagleHead
from draftwood.heads.eagle3 import Eagle3Head
from draftwood.heads.formats import FORMATS, LoadedHead, load_head, save_head
from draftwood.heads.hydra import HydraHead
from draftwood.heads.medusa import MedusaHead
from draftwood.heads.shipped import ShippedHead, find_head, shipped_for, shipped_heads
from draftwood.targets.base import Attend, TargetParts

__all__ = [
    "FORMATS",
    "KINDS",
    "Attend",
    "Eagle3Head",
    "EagleHead",
    "Head",
    "HeadConfig",
    "HeadModule",
    "HydraHead",
    "LoadedHead",
    "MedusaHead",
    "ShippedHead",
    "TargetParts",
    "build_head",
    "check_fit",
    "default_head_config",
    "find_head",
    "load_head",
    "save_head",
    "shipped_for",
    "shipped_heads",
    "usual_taps",
]
