"""Memory limits: rows that run through the target's layers at once, and free disk space."""

import shutil
from contextlib import suppress
from pathlib import Path

import torch

from draftwood.targets import Layers

WORKING_FRACTION = 16  # of GPU memory: 1 / 16


def working_memory(device: torch.device) -> int:
    """Return the GPU memory in bytes for rows that are computed at once."""
    return int(torch.cuda.get_device_properties(device).total_memory) // WORKING_FRACTION


def bytes_per_row(layers: Layers) -> int:
    """Estimate the bytes per row inside a layer."""
    config = layers.config
    states = 8 * config.hidden_size + 4 * config.intermediate_size + 4 * (config.q_size + config.kv_size)
    return states * layers.dtype.itemsize


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk that has, or will have, the folder."""
    for path in (folder, *folder.absolute().parents):
        with suppress(OSError):  # missing, or not accessible
            return shutil.disk_usage(path).free
    return 0
