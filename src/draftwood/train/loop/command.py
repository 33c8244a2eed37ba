"""A training run from command-line arguments, for `draftwood train head` and `python -m draftwood.train`."""

import argparse
import os
import sys
import time
from pathlib import Path

from draftwood.errors import DraftwoodError, OptionError
from draftwood.progress import Progress
from draftwood.train.arguments import add_arguments
from draftwood.train.config import load_config
from draftwood.train.loop.distributed import join_processes
from draftwood.train.loop.plan import Plan, make_plan
from draftwood.train.loop.run import train_head

ERROR_DELAY = 3.0  # seconds that other processes wait before they report an error


def train(args: argparse.Namespace) -> Path:
    """Run the training that the arguments describe, in every process that torchrun started."""

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

    config = load_config(args.config, args.changes, args.method)
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    return make_plan(config, world_size=num_processes, timed=args.time is not False, progress=progress)
