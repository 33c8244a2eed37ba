"""``draftwood train``: make training data and train draft heads."""

import argparse

from draftwood.cli.console import Screen, show, table
from draftwood.train.loop import plan_training, train


def _train_head(args: argparse.Namespace) -> int:
    if args.plan:
        return _print_plan(args)

    folder = train(args)
    return show(args, {"path": folder, "head": folder / "head"}, [str(folder / "head")])


def _print_plan(args: argparse.Namespace) -> int:
    screen = Screen(args.color)
    plan = plan_training(args, screen.progress)
    return show(args, plan.content(), table(screen.out, plan.rows()))
