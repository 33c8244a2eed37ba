"""Command-line arguments of a training run, for `draftwood train head` and `python -m draftwood.train`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from draftwood.errors import DraftwoodError, OptionError

if TYPE_CHECKING:
    from draftwood.progress import Progress
    from draftwood.train.loop.plan import Plan

NAMES = ("eagle", "hass", "eagle3", "griffin", "talf", "gto", "medusa", "hydra")
ERROR_DELAY = 3.0  # seconds that other processes wait before they report an error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "changes", nargs="*", metavar="SECTION.KEY=VALUE", help="configuration overrides, for example optim.lr=3e-5"
    )
    parser.add_argument("--method", choices=NAMES, default="", help="training method (same as method.name)")
    parser.add_argument("--config", metavar="FILE", help="configuration, a TOML file")
    parser.add_argument("--plan", action="store_true", help="print what would run, its memory and time, and exit")
    parser.add_argument(
        "--time",
        action=argparse.BooleanOptionalAction,
        help="with --plan: load the model and time a few steps (default: yes)",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in run.out")


def train(args: argparse.Namespace) -> Path:
    """Run the training that the arguments describe, in every process that torchrun started."""
    from draftwood.train.config import load_config
    from draftwood.train.loop.distributed import join_processes
    from draftwood.train.loop.run import train_head

    if args.time is not None:
        raise OptionError("--time and --no-time need --plan", next_step="Add --plan, or remove the option.")
    config = load_config(args.config, args.changes, args.method)
    with join_processes() as processes:
        return train_head(config, resume=args.resume, processes=processes)


def main(argv: list[str] | None = None) -> int:
    """Entry point for torchrun. Exit codes are those of the draftwood command."""
    parser = argparse.ArgumentParser(prog="python -m draftwood.train", description="Train a draft head.")
    add_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        if args.plan:
            if is_first:
                sys.stdout.write("".join(f"{name:14}{text}\n" for name, text in plan_training(args).rows()))
            return 0
        train(args)
    except DraftwoodError as error:
        if not is_first:
            time.sleep(ERROR_DELAY)  # usually the first process reports the same error and torchrun ends the others
        sys.stderr.write(f"draftwood: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def plan_training(args: argparse.Namespace, progress: Progress | None = None) -> Plan:
    """Plan the training that the arguments describe, for the current number of processes."""
    from draftwood.train.config import load_config
    from draftwood.train.loop.plan import make_plan

    config = load_config(args.config, args.changes, args.method)
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    return make_plan(config, world_size=num_processes, timed=args.time is not False, progress=progress)
