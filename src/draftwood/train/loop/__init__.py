"""A training run: setup, schedule, trainer, checkpoints, logs, distributed processes."""

from draftwood.train.loop.command import main, plan_training, train
from draftwood.train.loop.distributed import started_processes
from draftwood.train.loop.setup import measure_coverage
from draftwood.train.loop.template import write_template
from draftwood.train.loop.trainer import choose_dtype
