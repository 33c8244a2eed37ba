"""Targets: the contract, the native decoders, the transformers adapter, and loading."""

from draftwood.targets.base import (
    DEFAULT_TOP_K,
    Attend,
    DeviceAnswer,
    Draw,
    ForwardOutput,
    Layers,
    PendingPass,
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
from draftwood.targets.searches import Found, SearchLimits, SearchPlan
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from draftwood.targets.toprows import MAX_TOP_K, TopRows
