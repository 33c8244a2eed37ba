"""Targets: the contract, the native decoder, the transformers adapter, and loading."""

from draftwood.targets.base import (
    USUAL_TOP,
    Attend,
    Flight,
    ForwardOutput,
    Layers,
    Segment,
    Target,
    TargetInfo,
    TargetParts,
    chain_parents,
)
from draftwood.targets.cache import KVCache
from draftwood.targets.find_top import top_rows
from draftwood.targets.load import Loaded, load_target, pick_device
from draftwood.targets.room import default_cache_tokens
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from draftwood.targets.toprows import KERNEL_MOST, TopRows

__all__ = [
    "KERNEL_MOST",
    "TINY_CONFIG",
    "USUAL_TOP",
    "Attend",
    "Flight",
    "ForwardOutput",
    "KVCache",
    "Layers",
    "Loaded",
    "Segment",
    "Target",
    "TargetInfo",
    "TargetParts",
    "TopRows",
    "chain_parents",
    "default_cache_tokens",
    "load_target",
    "pick_device",
    "tiny_target",
    "top_rows",
]
