"""``draftwood bench record`` and ``draftwood bench replay``: record runs, and replay drafters on them."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftwood.bench.records import parse_methods
from draftwood.bench.replay import format_figures, list_warnings, load_recording, record_to, replay_methods
from draftwood.bench.tasks import load_tasks
from draftwood.cli.bench.tables import figures_table, print_note
from draftwood.cli.console import Screen, show
from draftwood.cli.options import model_options
from draftwood.config import SamplingParams
from draftwood.disk import check_output, new_file


def run_record(args: argparse.Namespace) -> int:
    screen, chosen, path = Screen(args.color), _parse_methods(args), Path(args.out)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed, n=args.samples)

    tasks = load_tasks(args.tasks or [], args.data, args.limit, screen.progress)
    how = {"width": args.width, "batch": args.batch, "force": args.force}
    how |= {"progress": screen.progress, "note": screen.note}
    recording = record_to(path, model_options(args, max_batch=max(args.batch, 1)), chosen, tasks, params, **how)
    size = path.stat().st_size
    content = {"recording": str(path), "bytes": size, "texts": len(recording.requests), "rows": recording.num_rows}
    return show(args, content, [f"{recording.summary()}, {size / 1e6:.1f} MB: {path}"])


def run_replay(args: argparse.Namespace) -> int:
    screen, chosen = Screen(args.color), _parse_methods(args)

    if args.out:
        check_output(Path(args.out), force=args.force and Path(args.out).resolve() != Path(args.recording).resolve())
    recording, study = load_recording(args.recording), {"contexts": args.context, "trajectories": args.trajectories}
    found = replay_methods(recording, chosen, **study, estimate=args.estimate, progress=screen.progress)
    content = {"recording": args.recording, "model": recording.target.name, "figures": [asdict(f) for f in found]}
    for note in list_warnings(found):
        print_note(screen, note)
    if args.out:
        with new_file(Path(args.out)) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return show(args, content, figures_table(screen.out, format_figures(found)))


def _parse_methods(args: argparse.Namespace) -> list[Any]:
    return parse_methods(args.drafters, args.memory, args.budget)
