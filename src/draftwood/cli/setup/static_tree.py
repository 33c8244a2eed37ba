"""``draftwood tune --static-tree``: the tree that suits a drafter, a model and its prompts."""

from __future__ import annotations

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
    _check(args, output, options)

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
    whole = f"with all {about['start_nodes']}: {about['start_tau']}"
    line = f"{len(shape)} nodes, {about['depth']} levels, tau {about['tau']} ({whole})"
    return show(args, {"tree": output, **about}, [line, f"written to {output}"])


def _check(args: argparse.Namespace, output: Path, options: dict[str, Any]) -> None:
    """What can be refused is refused before a model is loaded and prompts are answered."""
    if not args.prompts:
        raise OptionError("A static tree is measured on prompts", next_step="Give some with --prompts FILE.")
    if output.is_dir() or not output.parent.is_dir():
        raise OptionError("A static tree goes into a file", got=output, allowed="a file in a folder that is there")
    if output.exists() and not args.force:
        raise OptionError(f"{output} exists", next_step="Name another file, or replace it with --force.")

    drafter, _ = check_drafter(args.drafter, options)
    if "tree" not in {field.name for field in fields(drafter.Options)}:
        raise OptionError(
            f"The drafter {args.drafter!r} does not draft along a static tree",
            allowed="a drafter with the option 'tree': stand, recycling, sam+recycling, sequoia",
            next_step="Name one with --drafter.",
        )
    largest = len(initial_tree())
    if not 1 <= args.size <= largest:
        raise OptionError("The size of the tree is out of range", got=args.size, allowed=f"1 to {largest}")
