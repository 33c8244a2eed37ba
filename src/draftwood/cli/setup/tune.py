"""``draftwood tune``: measure once what every later run can use."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from draftwood.cli.console import Screen, Subparsers, add_command, add_run_options, model_options, show, table
from draftwood.cli.setup import static_tree
from draftwood.config import DEFAULT_DRAFTER
from draftwood.errors import OptionError

if TYPE_CHECKING:
    from draftwood.sizing import CostProfile
    from draftwood.targets import TargetInfo

_DETAILS = """\
Without --static-tree: times passes over 1 to 64 positions (where the decoder has a CUDA graph for
each of certain sizes: over those, up to 512) at a few lengths of context, from which --budget auto
takes the size of its trees, and makes the table of what follows each token of the vocabulary, from
which drafters over transitions start. Both are kept in the cache.

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
    from draftwood.targets import load_target
    from draftwood.tune import tune_costs, tune_successors

    loaded = load_target(model_options(args, max_batch=1), screen.progress)
    costs, path = tune_costs(loaded, screen.progress)
    kept = [path, *([] if args.no_successors else [tune_successors(loaded, screen.progress)])]
    info = loaded.target.info
    about = {"model": info.name, "device": str(info.device), "backend": info.backend, "pass_sizes": info.pass_sizes}
    content = {**about, **asdict(costs), "largest_tree": costs.largest, "kept": kept}
    lines = [*table(screen.out, _cost_rows(costs)), *_about_sizes(costs, info), *(f"kept in {path}" for path in kept)]
    return show(args, content, lines)


def _cost_rows(costs: CostProfile) -> list[tuple[str, ...]]:
    """A line a size: milliseconds, and beside them times a single position, at every length of context."""
    columns = [(f"context {context}", *_cells(costs, place)) for place, context in enumerate(costs.contexts)]
    return list(zip(("positions", *map(str, costs.sizes)), *columns, strict=True))


def _cells(costs: CostProfile, context_index: int) -> list[str]:
    pairs = zip(costs.seconds[context_index], costs.relative(context_index), strict=True)
    return [f"{1e3 * seconds:8.2f} ms {cost:6.2f}x" for seconds, cost in pairs]


def _about_sizes(costs: CostProfile, info: TargetInfo) -> list[str]:
    """What the sizes mean, where passes have no others."""
    if not costs.stepped:
        return []
    kind = "CUDA graphs" if info.device.type == "cuda" else "passes"
    larger = [str(size) for size in info.pass_sizes if size > costs.sizes[-1]]
    untimed = f" ({', '.join(larger)} too, not timed)" if larger else ""
    return [
        f"{kind} of these sizes are there{untimed}: a number of positions between them costs what the next one does",
        f"trees have up to {costs.largest} positions; larger passes are for batches",
    ]
