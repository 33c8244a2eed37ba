"""Room on the devices: how many rows go through the target's layers together, and what a disk has left."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

import torch

from draftwood.targets import Layers

PART_OF_GPU = 16


def part_of_gpu(device: torch.device) -> int:
    """Bytes that the rows which are computed together may take."""
    return int(torch.cuda.get_device_properties(device).total_memory) // PART_OF_GPU


def state_bytes(layers: Layers) -> int:
    """What a layer holds of one row, about."""
    config = layers.config
    states = 8 * config.hidden_size + 4 * config.intermediate_size + 4 * (config.q_size + config.kv_size)
    return states * layers.dtype.itemsize


def free_bytes(folder: Path) -> int:
    """Of the disk that the folder lies on, or would lie on."""
    for place in (folder, *folder.absolute().parents):
        with suppress(OSError):  # it is not there, or not for us
            return shutil.disk_usage(place).free
    return 0
