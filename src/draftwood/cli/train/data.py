"""``draftwood train data``: let the target answer prompts and store the answers for training."""

import argparse
import shlex
from dataclasses import fields

from draftwood.cli.console import PaceBar, Screen, show
from draftwood.cli.options import model_options
from draftwood.targets import load_target
from draftwood.train import DataSettings
from draftwood.train.data import Manifest, Part, make_data, prepare
from draftwood.train.loop import started_processes


def run(args: argparse.Namespace) -> int:
    given = {f.name: getattr(args, f.name) for f in fields(DataSettings)}
    settings = DataSettings(**{**given, "files": tuple(args.files)})
    screen = Screen(args.color)
    bar = screen.progress = PaceBar(screen.err)

    processes = started_processes()
    part = Part.parse(args.part) if args.part else Part(processes.rank + 1, processes.world_size)
    args.device = processes.device(args.device)
    prepared = prepare(settings, args.out, part)
    loaded = load_target(model_options(args, max_batch=args.batch), bar)
    try:
        manifest = make_data(prepared, loaded, bar, bar.add_tokens)
    except KeyboardInterrupt:
        bar.clear()
        screen.note(f"{args.out} has the finished shards. To continue:\n  {shlex.join(['draftwood', *args.argv])}")
        raise
    content = {"path": args.out, "model": manifest.model["name"], "prompts": manifest.prompts, **manifest.counts}
    if not manifest.complete:
        content |= {"part": part.number, "parts": part.total}
        told = f"{args.out}: part {part.number} of {part.total} is done, others are not yet{bar.pace}"
        return show(args, content, [told])
    return show(args, content, [f"{args.out}: {_describe_counts(manifest)}{bar.pace}"])


def _describe_counts(manifest: Manifest) -> str:
    counts = dict(manifest.counts)
    counted = [f"{counts.pop(name):,} {name.replace('_', ' ')}" for name in ("examples", "tokens", "answered_tokens")]
    lost = [f"{count:,} prompts {reason.replace('_', ' ')}" for reason, count in counts.items() if count]
    return ", ".join([*counted, *lost])
