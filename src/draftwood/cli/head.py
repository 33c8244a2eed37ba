"""``draftwood inspect head``: what a draft head is, and whether it fits a model."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from draftwood.cli.options import Subparsers, add_command
from draftwood.cli.report import counted, show, table
from draftwood.cli.terminal import Screen

if TYPE_CHECKING:
    from draftwood.heads import HeadConfig

SHIPPED = "smollm2-eagle3"
EXAMPLES = (
    "draftwood inspect head ./my-head",
    "draftwood inspect head ./my-head --model smollm2",
    "draftwood inspect head smollm2-eagle3 --json",
)
_DETAILS = """\
Reads a folder with config.json and the tensors of an EAGLE, EAGLE-3, Medusa or Hydra head, in the
layout of its authors, of SGLang, vLLM or speculators, or our own. Hidden states are numbered by
the layer that reads them; the number of layers stands for the last one's output.

With --model the head is compared with that model, of which only config.json is read. The command
ends with 1 if they do not fit."""
_VARIANTS = {
    "qk_norm": "queries and keys normed",
    "norm_before_fc": "taps normed together",
    "fc_norm": "taps normed one by one",
    "norm_before_residual": "residual normed",
    "norm_output": "fed back normed",
    "own_embed": "embeddings of its own",
}


def register(views: Subparsers[Any]) -> None:
    parser = add_command(views, "head", run, "State what a draft head is", *EXAMPLES, details=_DETAILS)
    about = f"the folder of the head, or the name of one that ships (default: {SHIPPED})"
    parser.add_argument("path", metavar="PATH", nargs="?", default=SHIPPED, help=about)
    parser.add_argument("--model", help="whether it fits this model: a known name, a folder, a GGUF file or a hub id")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    from draftwood.heads import check_fit, find_head, load_head
    from draftwood.heads.target import is_its_target, target_shape
    from draftwood.target.native.config import ModelConfig

    screen = Screen(args.color)
    shape = target_shape(args.model, screen.progress) if args.model else None
    path = find_head(args.path)
    head, config, layout = load_head(path, model=shape if isinstance(shape, ModelConfig) else None)
    size, dtype = head.num_parameters(), str(next(head.parameters()).dtype).removeprefix("torch.")
    taps = config.taps_for(shape.num_layers) if shape is not None else config.taps
    misfits = check_fit(config, shape) if shape is not None else None
    same = is_its_target(config, args.model) if args.model else None
    fits = None if misfits is None else not misfits
    fit = {"model": args.model, "fits": fits, "misfits": misfits, "trained_for_it": same}
    facts = {"path": path, "format": layout, "num_parameters": size, "dtype": dtype, "taps": taps}
    rows = [
        ("kind", f"{config.kind}, in the layout {layout}"),
        ("parameters", f"{size / 1e6:,.1f} million in {dtype}"),
        *_shape_rows(config),
        ("reads", _taps_text(config, taps)),
        ("vocabulary", f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens"),
        ("made for", config.target_name or "not stated"),
        *[("model card", str(card)) for card in path.glob("README.md")],
        *([] if misfits is None else [(f"fits {args.model}", "; ".join(misfits) if misfits else "yes")]),
        *([] if same is None else [("trained for it", "yes" if same else "no, for another model")]),
    ]
    show(args, {**facts, **fit, "config": asdict(config)}, table(screen.out, rows))
    return 1 if misfits else 0


def _shape_rows(config: HeadConfig) -> list[tuple[str, str]]:
    rows = []
    if config.num_heads_ahead:
        blocks = counted(config.num_residual, "residual block")
        rows.append(("looks ahead", f"{counted(config.num_heads_ahead, 'token')}, {blocks} for each"))
    if config.num_layers:
        attention = f"{config.num_heads} heads over {config.num_kv_heads}, {config.head_dim} wide"
        rows.append(("layers", f"{config.num_layers}, {config.hidden_size} wide, {attention}"))
    variants = [text for name, text in _VARIANTS.items() if getattr(config, name)]
    return [*rows, ("variant", ", ".join(variants))] if variants else rows


def _taps_text(config: HeadConfig, taps: tuple[int, ...]) -> str:
    width = f"of {config.target_hidden_size}"
    if config.kind != "eagle3":
        return f"the last hidden state {width}, {'behind' if config.feature == 'normed' else 'before'} the final norm"
    if not taps:
        return f"{config.num_taps} hidden states {width}, the usual ones of its model"
    return f"the hidden states {', '.join(map(str, taps))} {width}"
