"""``draftwood tune --static-tree``: optimise a tree for a drafter, a model and prompts."""

import argparse
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from draftwood.cli.console import Screen, show
from draftwood.cli.options import drafter_options, model_options, sampling_params
from draftwood.drafters import check_drafter
from draftwood.errors import OptionError
from draftwood.llm import LLM
from draftwood.prompts import prompt_ids, read_prompts
from draftwood.targets import load_target
from draftwood.tree import initial_tree
from draftwood.tune import optimise_tree


def run(args: argparse.Namespace) -> int:
    screen = Screen(args.color)
    output = Path(args.static_tree).expanduser()
    params = sampling_params(args, n=args.samples)
    options = drafter_options(args.drafter_option)
    _check_options(args, output, options)

    prompts = read_prompts(args.prompts, args.limit)
    loaded = load_target(model_options(args, max_batch=1), screen.progress)
    shape, about = optimise_tree(
        partial(LLM.from_target, loaded.target, loaded.codec, memory="process", max_batch=1),
        [prompt_ids(loaded.codec, prompt) for prompt in prompts],
        params,
        drafter=args.drafter,
        drafter_options=options,
        size=args.size,
        progress=screen.progress,
    )
    shape.save(output, **about)
    full = f"with all {about['start_nodes']} nodes: {about['start_tau']}"
    line = f"{len(shape)} nodes, {about['depth']} levels, tau {about['tau']} ({full})"
    return show(args, {"tree": output, **about}, [line, f"written to {output}"])


def _check_options(args: argparse.Namespace, output: Path, options: dict[str, Any]) -> None:
    """Reject invalid options before the model is loaded."""
    if not args.prompts:
        raise OptionError("--static-tree needs prompts", next_step="Add --prompts FILE.")
    if output.is_dir() or not output.parent.is_dir():
        raise OptionError("Invalid output file", got=output, allowed="a file in an existing folder")
    if output.exists() and not args.force:
        raise OptionError(f"{output} already exists", next_step="Choose another file, or add --force to replace it.")

    drafter, _ = check_drafter(args.drafter, options)
    if "tree" not in {field.name for field in fields(drafter.Options)}:
        raise OptionError(
            f"The drafter {args.drafter!r} does not use a static tree",
            allowed="a drafter with the option 'tree': stand, recycling, sam+recycling, sequoia",
            next_step="Choose one with --drafter.",
        )
    largest = len(initial_tree())
    if not 1 <= args.size <= largest:
        raise OptionError("The size of the tree is out of range", got=args.size, allowed=f"1 to {largest}")
