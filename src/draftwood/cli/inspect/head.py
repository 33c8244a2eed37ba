"""``draftwood inspect head``: what a draft head is, whether it fits a model, and what it is worth there."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from draftwood.cli.console import Screen, Subparsers, add_command, show, table
from draftwood.cli.inspect.head_options import add_worth_options, check_worth_options
from draftwood.cli.inspect.head_rows import shape_rows, taps_text, worth_lines
from draftwood.cli.inspect.head_worth import measure_worth

SHIPPED = "smollm2-eagle3"
EXAMPLES = (
    "draftwood inspect head ./my-head",
    "draftwood inspect head ./my-head --model smollm2",
    "draftwood inspect head ./my-head --model smollm2 --texts data --limit 100",
    "draftwood inspect head smollm2-eagle3 --json",
)
_DETAILS = """\
Reads a folder with config.json and the tensors of an EAGLE, EAGLE-3, Medusa or Hydra head, in the
layout of its authors, of SGLang, vLLM or speculators, or our own. Hidden states are numbered by
the layer that reads them; the number of layers stands for the last one's output.

With --model the head is compared with that model, of which only config.json is read. The command
ends with 1 if they do not fit.

With --texts the model runs: how many tokens a pass yields with real draft trees, how right the head
is behind the model's own words and below its own guesses, and how far its probabilities are from
that (expected calibration error). Texts that it was trained on flatter it. Those that a training run
held out are taken with its data.held_out as --limit, its run.seed as --seed, its data.max_length as
--max-length and its folders in the same order."""


def register(views: Subparsers[Any]) -> None:
    parser = add_command(views, "head", run, "State what a draft head is", *EXAMPLES, details=_DETAILS)
    about = f"the folder of the head, or the name of one that ships (default: {SHIPPED})"
    parser.add_argument("path", metavar="PATH", nargs="?", default=SHIPPED, help=about)
    parser.add_argument("--model", help="whether it fits this model: a known name, a folder, a GGUF file or a hub id")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    add_worth_options(parser)


def run(args: argparse.Namespace) -> int:
    from draftwood.heads import check_fit, find_head, load_head, load_target_shape, was_trained_for
    from draftwood.models import ModelConfig

    check_worth_options(args)
    screen = Screen(args.color)
    shape = load_target_shape(args.model, screen.progress) if args.model else None
    path = find_head(args.path)
    head, config, layout = load_head(path, model=shape if isinstance(shape, ModelConfig) else None)
    size, dtype = head.num_parameters(), str(next(head.parameters()).dtype).removeprefix("torch.")
    taps = config.taps_for(shape.num_layers) if shape is not None else config.taps
    misfits = check_fit(config, shape) if shape is not None else None
    same = was_trained_for(config, args.model) if args.model else None
    fits = None if misfits is None else not misfits
    fit = {"model": args.model, "fits": fits, "misfits": misfits, "trained_for_it": same}
    facts = {"path": path, "format": layout, "num_parameters": size, "dtype": dtype, "taps": taps}
    rows = [
        ("kind", f"{config.kind}, in the layout {layout}"),
        ("parameters", f"{size / 1e6:,.1f} million in {dtype}"),
        *shape_rows(config),
        ("reads", taps_text(config, taps)),
        ("vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"),
        ("made for", config.target_name or "not stated"),
        *[("model card", str(card)) for card in path.glob("README.md")],
        *([] if misfits is None else [(f"fits {args.model}", "; ".join(misfits) if misfits else "yes")]),
        *([] if same is None else [("trained for it", "yes" if same else "no, for another model")]),
    ]
    worth = measure_worth(args, head, screen) if args.texts and not misfits else None
    lines = [*table(screen.out, rows), *([] if worth is None else worth_lines(screen.out, worth))]
    show(args, {**facts, **fit, "config": asdict(config), "worth": worth}, lines)
    return 1 if misfits else 0
