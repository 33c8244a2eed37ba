"""The arguments of a training run, which `draftwood train head` and `python -m draftwood.train` share."""

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
PATIENCE = 3.0  # seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("changes", nargs="*", metavar="SECTION.KEY=VALUE", help="changes to it, as in optim.lr=3e-5")
    parser.add_argument("--method", choices=NAMES, default="", help="how the head is trained (or method.name)")
    parser.add_argument("--config", metavar="FILE", help="the configuration, a TOML file")
    parser.add_argument("--plan", action="store_true", help="say what would run, its memory and its time, and end")
    parser.add_argument(
        "--time",
        action=argparse.BooleanOptionalAction,
        help="with --plan: whether the model is loaded and a few steps are timed (default: they are)",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in run.out")


def train(args: argparse.Namespace) -> Path:
    """A run as the arguments ask for it, in every process that torchrun started."""
    from draftwood.train.config import load_config
    from draftwood.train.loop.distributed import joined_processes
    from draftwood.train.loop.run import train_head

    if args.time is not None:
        raise OptionError("--time and --no-time are for plans", next_step="Add --plan, or leave it out.")
    config = load_config(args.config, args.changes, args.method)
    with joined_processes() as processes:
        return train_head(config, resume=args.resume, processes=processes)


def main(argv: list[str] | None = None) -> int:
    """For torchrun; exit codes as those of the command line."""
    parser = argparse.ArgumentParser(prog="python -m draftwood.train", description="Train a draft head.")
    add_arguments(parser)
    args = parser.parse_intermixed_args(argv)
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        if args.plan:
            if is_first:
                sys.stdout.write("".join(f"{name:14}{text}\n" for name, text in planned(args).rows()))
            return 0
        train(args)
    except DraftwoodError as error:
        if not is_first:
            time.sleep(PATIENCE)  # if the first one has met the same, it says so and torchrun ends the others
        sys.stderr.write(f"draftwood: error: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def planned(args: argparse.Namespace, progress: Progress | None = None) -> Plan:
    """What the arguments ask for, in as many processes as there are."""
    from draftwood.train.config import load_config
    from draftwood.train.loop.plan import make_plan

    config = load_config(args.config, args.changes, args.method)
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    return make_plan(config, world_size=num_processes, timed=args.time is not False, progress=progress)
