"""``draftwood tune``: measure costs and build tables for later runs."""

import argparse
from dataclasses import asdict

from draftwood.cli.console import Screen, show, table
from draftwood.cli.options import model_options
from draftwood.cli.setup import explain, priors, static_tree
from draftwood.config import DEFAULT_DRAFTER
from draftwood.errors import OptionError
from draftwood.sizing import CostProfile
from draftwood.targets import TargetInfo, load_target
from draftwood.tune import tune_costs, tune_successors


def run(args: argparse.Namespace) -> int:
    if args.static_tree:
        return static_tree.run(args)
    if args.priors is not None:
        return priors.run(args)
    if args.explain:
        return explain.run(args)
    if args.prompts:
        next_step = "Add --static-tree FILE, --priors or --explain."
        raise OptionError("--prompts needs --static-tree, --priors or --explain", got=args.prompts, next_step=next_step)
    if args.drafter != DEFAULT_DRAFTER or args.drafter_option:
        given = " ".join([args.drafter, *args.drafter_option])
        raise OptionError("--drafter needs --static-tree", got=given, next_step="Add --static-tree FILE.")
    screen = Screen(args.color)

    loaded = load_target(model_options(args, max_batch=1), screen.progress)
    costs, path = tune_costs(loaded, screen.progress)
    kept = [path, *([] if args.no_successors else [tune_successors(loaded, screen.progress)])]
    info = loaded.target.info
    about = {"model": info.name, "device": str(info.device), "backend": info.backend, "pass_sizes": info.pass_sizes}
    content = {**about, **asdict(costs), "largest_tree": costs.largest, "kept": kept}
    notes = [*_describe_sizes(costs, info), *(f"stored in {path}" for path in kept)]
    return show(args, content, [*table(screen.out, _format_costs(costs)), *notes])


def _format_costs(costs: CostProfile) -> list[tuple[str, ...]]:
    """Format one row per size: milliseconds and cost relative to one position, per context length."""
    columns = [(f"context {context}", *_format_cells(costs, place)) for place, context in enumerate(costs.contexts)]
    return list(zip(("positions", *map(str, costs.sizes)), *columns, strict=True))


def _format_cells(costs: CostProfile, context_index: int) -> list[str]:
    pairs = zip(costs.seconds[context_index], costs.relative(context_index), strict=True)
    return [f"{1e3 * seconds:8.2f} ms {cost:6.2f}x" for seconds, cost in pairs]


def _describe_sizes(costs: CostProfile, info: TargetInfo) -> list[str]:
    """Explain the sizes if passes are limited to them."""
    if not costs.stepped:
        return []
    kind = "CUDA graphs" if info.device.type == "cuda" else "passes"
    larger = [str(size) for size in info.pass_sizes if size > costs.sizes[-1]]
    untimed = f" (also {', '.join(larger)}, not timed)" if larger else ""
    return [
        f"{kind} exist for these sizes only{untimed}: other sizes cost as much as the next larger one",
        f"trees have up to {costs.largest} positions; larger passes are used for batches",
    ]
