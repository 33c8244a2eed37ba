"""``draftwood export``: a head in the layout that another engine reads."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftwood.cli.console import Subparsers, add_command, show
from draftwood.config import DTYPES

LAYOUTS = ("eagle", "sglang", "vllm", "speculators", "medusa", "hydra", "draftwood")
_DETAILS = """\
eagle       the authors' own, of EAGLE-1/2 and of EAGLE-3 heads
sglang      EAGLE-3 for SGLang
vllm        EAGLE-3 for vLLM
speculators EAGLE-3 for the speculators library and vLLM; names the model, so it wants --model
medusa      the authors' own
hydra       the authors' own
draftwood   our own, which can hold every head

What a layout has no place for is refused, with the layouts that have. Hidden states are numbered
as the engine numbers them.

A head that training wrote is in float32; --dtype bfloat16 halves it. With --model, if that model is on
this disk, our own layout also notes its fingerprint: which model, whatever it is called."""


def register(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "export",
        run,
        "Write a draft head in another engine's layout",
        "draftwood export ./my-head --to sglang ./my-head-sglang",
        "draftwood export smollm2-eagle3 --to vllm ./smollm2-eagle3-vllm",
        "draftwood export ./my-head --to speculators ./out --model meta-llama/Llama-3.1-8B-Instruct",
        "draftwood export ./downloaded-head --to draftwood ./my-head --force",
        details=_DETAILS,
    )
    parser.add_argument(
        "head", metavar="HEAD", help="the folder of the head, in any layout, or the name of one that ships"
    )
    parser.add_argument("out", metavar="OUT", help="the folder to write")
    parser.add_argument("--to", required=True, choices=LAYOUTS, help="the layout")
    parser.add_argument("--dtype", choices=DTYPES[1:], help="number format of the tensors (default: as they are)")
    parser.add_argument("--model", default="", help="the model it drafts for: its name, or a folder on this disk")
    parser.add_argument("--force", action="store_true", help="replace the folder where it exists")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    import torch

    from draftwood.errors import OptionError
    from draftwood.heads import check_fit, find_head, find_local_fingerprint, find_local_shape, load_head, save_head
    from draftwood.models import ModelConfig

    source = find_head(args.head)
    if source.resolve() == Path(args.out).resolve():
        raise OptionError("A head cannot replace itself", got=args.out, next_step="Name another folder.")
    shape = find_local_shape(args.model) if args.model else None
    model = shape if isinstance(shape, ModelConfig) else None
    dtype = getattr(torch, args.dtype) if args.dtype else None
    head, config, layout = load_head(source, dtype=dtype, model=model)
    misfits = check_fit(config, shape) if shape is not None else []
    if misfits:
        raise OptionError("The head was made for another model", got="; ".join(misfits), next_step="Check --model.")
    if args.model:
        known = find_local_fingerprint(args.model) or config.target_fingerprint
        head.config = replace(config, target_fingerprint=known)
    folder = save_head(head, args.out, to=args.to, target_name=args.model, model=model, force=args.force)
    files = sorted(path.name for path in folder.iterdir())
    content = {"path": folder, "format": args.to, "from_format": layout, "kind": config.kind, "files": files}
    return show(args, content, [f"{folder}: {config.kind} head in the layout {args.to} ({', '.join(files)})"])
