"""``draftwood bench record`` and ``draftwood bench replay``: record runs, and replay drafters on them."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftwood.cli.bench.options import DEFAULTS, add_prompt_settings, add_setting, budgets, methods, numbers
from draftwood.cli.bench.tables import figures_table, print_note
from draftwood.cli.console import Screen, Subparsers, add_command, add_model_options, model_options, show
from draftwood.config import SamplingParams
from draftwood.disk import check_output, new_file

BUDGET, DRAFTERS, WIDTH = 60, "goose,recycling", 16
_RECORD_DETAILS = "Record several drafters: a replay of another drafter then finds more of its draft tokens recorded."
_REPLAY_DETAILS = """\
No model runs. A recorded method is reproduced exactly. 'known' is the share of rejected nodes with
recorded rows: if it is small, tau is too low; record more drafters or add --estimate.
Long contexts are synthetic: the texts of other prompts are put before each prompt."""


def register(commands: Subparsers[Any]) -> None:
    register_record(commands)
    register_replay(commands)


def register_record(commands: Subparsers[Any]) -> None:
    lines = (
        "draftwood bench record --limit 2 --out own.recording",
        "draftwood bench record --drafters goose,recycling --tasks humaneval --data prompts --out code.recording",
    )
    parser = add_command(commands, "record", run_record, "Record runs for replay", *lines, details=_RECORD_DETAILS)
    add = _add_methods(parser)
    add_prompt_settings(parser)
    add("--samples", type=int, metavar="N", default=1, help="samples per prompt (default: 1)")
    for name, kind, text in (
        ("max_tokens", int, "maximum number of output tokens"),
        ("temperature", float, "0 is greedy"),
        ("seed", int, "random seed"),
    ):
        add_setting(parser, name, kind, "N", text, default=DEFAULTS[name])
    add("--width", type=int, metavar="K", default=WIDTH, help=f"top tokens stored per row of logits (default: {WIDTH})")
    add("--out", metavar="FILE", required=True, help="output file, as in code.recording")
    add("--force", action="store_true", help="replace an existing file")
    add("--json", action="store_true", help="print one JSON object")
    add_model_options(parser)


def register_replay(commands: Subparsers[Any]) -> None:
    line = "draftwood bench replay code.recording --drafters goose,recycling"
    more = (f"{line} --budget 8,16,32,60", f"{line} --context 1024,4096,16384,32768", f"{line} --trajectories 1,4,16")
    add = _add_methods(
        add_command(commands, "replay", run_replay, "Replay drafters on recorded texts", *more, details=_REPLAY_DETAILS)
    )
    add("recording", metavar="FILE", help="a file written by bench record")
    add("--context", type=numbers, metavar="LIST", default=[], help="study: context lengths in tokens")
    add("--trajectories", type=numbers, metavar="LIST", default=[], help="study: numbers of samples per prompt")
    add("--estimate", action="store_true", help="fill unknown rows from the nearest similar context")
    add("--json", action="store_true", help="print one JSON object")
    add("--out", metavar="FILE", help="write the JSON object to a file")
    add("--force", action="store_true", help="replace an existing file")


def run_record(args: argparse.Namespace) -> int:
    screen, chosen, path = Screen(args.color), _parse_methods(args), Path(args.out)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed, n=args.samples)
    from draftwood.bench.replay import record_to
    from draftwood.bench.tasks import load_tasks

    tasks = load_tasks(args.tasks or [], args.data, args.limit, screen.progress)
    how = {"width": args.width, "force": args.force, "progress": screen.progress, "note": screen.note}
    recording = record_to(path, model_options(args, max_batch=1), chosen, tasks, params, **how)
    size = path.stat().st_size
    content = {"recording": str(path), "bytes": size, "texts": len(recording.requests), "rows": recording.num_rows}
    return show(args, content, [f"{recording.summary()}, {size / 1e6:.1f} MB: {path}"])


def run_replay(args: argparse.Namespace) -> int:
    screen, chosen = Screen(args.color), _parse_methods(args)
    from draftwood.bench.replay import format_figures, list_warnings, load_recording, replay_methods

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


def _add_methods(parser: argparse.ArgumentParser) -> Any:
    add = parser.add_argument
    add("--drafters", type=methods, metavar="LIST", default=DRAFTERS, help=f"methods (default: {DRAFTERS})")
    add("--budget", type=budgets, metavar="LIST", default=str(BUDGET), help=f"positions per pass (default: {BUDGET})")
    add_setting(parser, "memory", str, "SCOPE", "scope of what drafters learn", default=DEFAULTS["memory"])
    return add


def _parse_methods(args: argparse.Namespace) -> list[Any]:
    from draftwood.bench.records import parse_methods

    return parse_methods(args.drafters, args.memory, args.budget)
