"""``draftwood tune``: measure once what every later run can use."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from draftwood.cli import static_tree
from draftwood.cli.options import Subparsers, add_command, add_run_options
from draftwood.cli.report import show, table
from draftwood.cli.terminal import Screen
from draftwood.config import DEFAULT_DRAFTER
from draftwood.errors import OptionError

_DETAILS = """\
Without --static-tree: times passes over 1 to 64 positions at a few lengths of context, from which
--budget auto takes the size of its trees, and makes the table of what follows each token of the
vocabulary, from which drafters over transitions start. Both are kept in the cache.

With --static-tree: answers prompts with a tree of 625 nodes and keeps those that were accepted
most. The file is for --drafter-option tree=FILE of stand, recycling and sequoia."""


def register(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "tune",
        run,
        "Measure this machine and model once, for all later runs",
        "draftwood tune",
        "draftwood tune --model smollm2 --no-successors",
        "draftwood tune --static-tree t.json --prompts p.jsonl --drafter stand --temperature 0.6",
        details=_DETAILS,
    )
    parser.add_argument("--no-successors", action="store_true", help="leave the successor table as it is")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    tree = parser.add_argument_group("static tree")
    tree.add_argument("--static-tree", metavar="FILE", help="measure a static tree and write it there")
    tree.add_argument("--prompts", metavar="FILE", help="what it is measured on; one a line, or .jsonl")
    tree.add_argument("--limit", type=int, metavar="N", help="only the first N prompts")
    tree.add_argument("--samples", type=int, default=1, metavar="N", help="answers to each prompt (default: 1)")
    tree.add_argument("--size", type=int, default=80, metavar="N", help="nodes to keep, root included (default: 80)")
    tree.add_argument("--force", action="store_true", help="replace the tree's file")
    add_run_options(parser, own_trees=True)


def run(args: argparse.Namespace) -> int:
    if args.static_tree:
        return static_tree.run(args)
    if args.prompts:
        raise OptionError("Prompts are for a static tree", got=args.prompts, next_step="Add --static-tree FILE.")
    if args.drafter != DEFAULT_DRAFTER or args.drafter_option:
        given = " ".join([args.drafter, *args.drafter_option])
        raise OptionError("A drafter is for a static tree", got=given, next_step="Add --static-tree FILE.")
    screen = Screen(args.color)
    from draftwood.target.build import load_target
    from draftwood.tune import tune_costs, tune_successors

    loaded = load_target(
        args.model,
        dtype=args.dtype,
        device=args.device,
        target=args.target,
        max_batch=1,
        progress=screen.progress,
    )
    costs, path = tune_costs(loaded, screen.progress)
    kept = [path, *([] if args.no_successors else [tune_successors(loaded, screen.progress)])]
    content = {"model": loaded.target.info.name, **asdict(costs), "kept": kept}
    rows = [("positions", *map(str, costs.sizes), "")]
    for index, context in enumerate(costs.contexts):
        rows.append((f"context {context}", *(f"{cost:.2f}" for cost in costs.relative(index)), "times one position"))
    return show(args, content, [*table(screen.out, rows), *(f"kept in {path}" for path in kept)])
