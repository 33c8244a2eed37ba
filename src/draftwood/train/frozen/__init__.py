"""The frozen target: hidden states along texts, computed or stored on disk."""

from draftwood.train.frozen.frozen_target import FrozenTarget
from draftwood.train.frozen.memory import bytes_per_row, free_bytes, working_memory
from draftwood.train.frozen.stored_signals import StoredSignals
