"""A training run: setup, schedule, trainer, checkpoints, logs, distributed processes."""

from draftwood.train.loop.command import add_arguments, main, plan_training, train
from draftwood.train.loop.trainer import choose_dtype

__all__ = ["add_arguments", "choose_dtype", "main", "plan_training", "train"]
