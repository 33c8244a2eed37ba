"""``draftwood inspect head``: describe a draft head, check its fit to a model, evaluate it on texts."""

import argparse
from dataclasses import asdict

from draftwood.cli.console import Screen, show, table
from draftwood.cli.inspect.head_options import check_worth_options
from draftwood.cli.inspect.head_rows import shape_rows, taps_text, worth_lines
from draftwood.cli.inspect.head_worth import measure_worth
from draftwood.heads import check_fit, find_head, load_head, load_target_shape, was_trained_for
from draftwood.models import ModelConfig


def run(args: argparse.Namespace) -> int:
    check_worth_options(args)
    screen = Screen(args.color)
    shape = load_target_shape(args.model) if args.model else None
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
        ("kind", f"{config.kind}, layout {layout}"),
        ("parameters", f"{size / 1e6:,.1f} million in {dtype}"),
        *shape_rows(config),
        ("reads", taps_text(config, taps)),
        ("vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"),
        ("target model", config.target_name or "not stated"),
        *[("model card", str(card)) for card in path.glob("README.md")],
        *([] if misfits is None else [(f"fits {args.model}", "; ".join(misfits) if misfits else "yes")]),
        *([] if same is None else [("trained for it", "yes" if same else "no, for another model")]),
    ]
    worth = measure_worth(args, head, screen) if args.texts and not misfits else None
    lines = [*table(screen.out, rows), *([] if worth is None else worth_lines(screen.out, worth))]
    show(args, {**facts, **fit, "config": asdict(config), "worth": worth}, lines)
    return 1 if misfits else 0
