"""The frozen target: hidden states along texts, and how much memory they take."""

from draftwood.train.frozen.room import free_bytes, part_of_gpu, state_bytes
from draftwood.train.frozen.signals import KeptSignals
from draftwood.train.frozen.target import FrozenTarget

__all__ = ["FrozenTarget", "KeptSignals", "free_bytes", "part_of_gpu", "state_bytes"]
