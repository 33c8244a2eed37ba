"""``draftwood train``: make training data and train draft heads."""

from __future__ import annotations

import argparse
from typing import Any

from draftwood.cli.console import Screen, Subparsers, add_command, add_group, show, table
from draftwood.cli.train.data import register_data
from draftwood.train.loop import add_arguments

_EXAMPLES = (
    "draftwood train data prompts.jsonl --out data",
    "draftwood train head --method eagle3 data.folder=data run.out=runs/first optim.epochs=2",
)
_HEAD_EXAMPLES = (
    "draftwood train head --method eagle3 --config my.toml",
    "draftwood train head --method eagle3 --config my.toml --plan",
    "draftwood train head --method eagle3 data.folder=data run.out=runs/first optim.epochs=2",
    "draftwood train head --method gto --config my.toml head.start=runs/first/best run.out=runs/gto optim.lr=5e-6",
    "draftwood train head --method eagle3 --config my.toml --resume",
    "torchrun --nproc-per-node 4 -m draftwood.train --method eagle3 --config my.toml run.strategy=fsdp",
)
_DETAILS = """\
The configuration has the tables [model], [data], [head], [method], [optim], [validate] and [run].
Every key can be set on the command line. Required: data.folder, run.out and one of optim.steps,
optim.epochs and optim.minutes. The folder of the run gets the resolved configuration, log.jsonl,
recent checkpoints, the best head, the final head and a plot.

eagle, hass   EAGLE heads; talf and griffin too, and those train EAGLE-3 heads as well
eagle3        EAGLE-3 heads: training-time test
gto           trains a trained head (head.start) further on its own draft trees
medusa, hydra heads that predict several tokens ahead"""


def register(commands: Subparsers[Any]) -> None:
    actions = add_group(commands, "train", "Train a draft head for a model", *_EXAMPLES)
    register_data(actions)
    head = add_command(actions, "head", _train_head, "Train a draft head", *_HEAD_EXAMPLES, details=_DETAILS)
    add_arguments(head)
    head.add_argument("--json", action="store_true", help="print one JSON object")


def _train_head(args: argparse.Namespace) -> int:
    if args.plan:
        return _print_plan(args)
    from draftwood.train.loop import train

    folder = train(args)
    return show(args, {"path": folder, "head": folder / "head"}, [str(folder / "head")])


def _print_plan(args: argparse.Namespace) -> int:
    from draftwood.train.loop import plan_training

    screen = Screen(args.color)
    plan = plan_training(args, screen.progress)
    return show(args, plan.content(), table(screen.out, plan.rows()))
