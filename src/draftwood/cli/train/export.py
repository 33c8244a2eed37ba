"""``draftwood export``: write a head in the layout of another engine."""

import argparse
from dataclasses import replace
from pathlib import Path

from draftwood.cli.console import show
from draftwood.errors import OptionError
from draftwood.heads import check_fit, find_head, find_local_fingerprint, find_local_shape, load_head, save_head
from draftwood.models import ModelConfig


def run(args: argparse.Namespace) -> int:
    import torch

    source = find_head(args.head)
    if source.resolve() == Path(args.out).resolve():
        raise OptionError("A head cannot replace itself", got=args.out, next_step="Choose another folder.")
    shape = find_local_shape(args.model) if args.model else None
    model = shape if isinstance(shape, ModelConfig) else None
    dtype = getattr(torch, args.dtype) if args.dtype else None
    head, config, layout = load_head(source, dtype=dtype, model=model)
    misfits = check_fit(config, shape) if shape is not None else []
    if misfits:
        raise OptionError("The head belongs to another model", got="; ".join(misfits), next_step="Check --model.")
    if args.model:
        known = find_local_fingerprint(args.model) or config.target_fingerprint
        head.config = replace(config, target_fingerprint=known)
    folder = save_head(head, args.out, to=args.to, target_name=args.model, model=model, force=args.force)
    files = sorted(path.name for path in folder.iterdir())
    content = {"path": folder, "format": args.to, "from_format": layout, "kind": config.kind, "files": files}
    return show(args, content, [f"{folder}: {config.kind} head in the layout {args.to} ({', '.join(files)})"])
