"""The training run: set-up, schedule, checkpoints, logs, several processes."""

from draftwood.train.loop.command import add_arguments, main, planned, train
from draftwood.train.loop.trainer import compute_dtype

__all__ = ["add_arguments", "compute_dtype", "main", "planned", "train"]
