"""``draftwood bench record`` and ``draftwood bench replay``: runs written down, and drafters tried on them again."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftwood.cli.bench.options import DEFAULTS, add_prompt_settings, add_setting, budgets, methods, numbers
from draftwood.cli.bench.tables import figures_table, tell
from draftwood.cli.console import Screen, Subparsers, add_command, add_model_options, show
from draftwood.config import SamplingParams
from draftwood.disk import check_output, new_file

BUDGET, DRAFTERS, WIDTH = 60, "goose,recycling", 16
_RECORDS = "The more drafters record, the more of what another one would guess is known when it is replayed."
_AGAIN = """\
No model runs. A method that was recorded comes out as it ran. 'known' is the share of wrong guesses
whose rows were recorded: where it is small, tau comes out too low; record more drafters or --estimate.
Long contexts are synthetic: the texts of other prompts stand before each prompt."""


def register(commands: Subparsers[Any]) -> None:
    register_record(commands)
    register_replay(commands)


def register_record(commands: Subparsers[Any]) -> None:
    lines = (
        "draftwood bench record --limit 2 --out own.recording",
        "draftwood bench record --drafters goose,recycling --tasks humaneval --data prompts --out code.recording",
    )
    parser = add_command(commands, "record", run_record, "Write down runs to replay", *lines, details=_RECORDS)
    add = _add_methods(parser)
    add_prompt_settings(parser)
    add("--samples", type=int, metavar="N", default=1, help="answers to each prompt (default: 1)")
    for name, kind, text in (
        ("max_tokens", int, "tokens of each answer at most"),
        ("temperature", float, "0 is greedy"),
        ("seed", int, "same seed, same draws"),
    ):
        add_setting(parser, name, kind, "N", text, default=DEFAULTS[name])
    add("--width", type=int, metavar="K", default=WIDTH, help=f"tokens kept of each row of logits (default: {WIDTH})")
    add("--out", metavar="FILE", required=True, help="the file, as in code.recording")
    add("--force", action="store_true", help="replace that file")
    add("--json", action="store_true", help="one JSON object on stdout")
    add_model_options(parser)


def register_replay(commands: Subparsers[Any]) -> None:
    line = "draftwood bench replay code.recording --drafters goose,recycling"
    more = (f"{line} --budget 8,16,32,60", f"{line} --context 1024,4096,16384,32768", f"{line} --trajectories 1,4,16")
    add = _add_methods(add_command(commands, "replay", run_replay, "Draft recorded texts again", *more, details=_AGAIN))
    add("recording", metavar="FILE", help="what bench record wrote")
    add("--context", type=numbers, metavar="LIST", default=[], help="behind contexts of so many tokens")
    add("--trajectories", type=numbers, metavar="LIST", default=[], help="over the first so many samples of a prompt")
    add("--estimate", action="store_true", help="unknown rows: take those of the nearest context that ends alike")
    add("--json", action="store_true", help="one JSON object on stdout")
    add("--out", metavar="FILE", help="the same object into a file")
    add("--force", action="store_true", help="replace that file")


def run_record(args: argparse.Namespace) -> int:
    screen, chosen, path = Screen(args.color), _methods(args), Path(args.out)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed, n=args.samples)
    from draftwood.bench.replay import record_to
    from draftwood.bench.tasks import load_tasks

    tasks = load_tasks(args.tasks or [], args.data, args.limit, screen.progress)
    how = {name: getattr(args, name) for name in ("width", "dtype", "quantize", "device", "target", "force")}
    recording = record_to(path, args.model, chosen, tasks, params, **how, progress=screen.progress, note=screen.note)
    size = path.stat().st_size
    content = {"recording": str(path), "bytes": size, "texts": len(recording.requests), "rows": recording.num_rows}
    return show(args, content, [f"{recording.summary()}, {size / 1e6:.1f} MB: {path}"])


def run_replay(args: argparse.Namespace) -> int:
    screen, chosen = Screen(args.color), _methods(args)
    from draftwood.bench.replay import figure_notes, figure_rows, load_recording, replay_methods

    if args.out:
        check_output(Path(args.out), force=args.force and Path(args.out).resolve() != Path(args.recording).resolve())
    recording, study = load_recording(args.recording), {"contexts": args.context, "trajectories": args.trajectories}
    found = replay_methods(recording, chosen, **study, estimate=args.estimate, progress=screen.progress)
    content = {"recording": args.recording, "model": recording.target.name, "figures": [asdict(f) for f in found]}
    for note in figure_notes(found):
        tell(screen, note)
    if args.out:
        with new_file(Path(args.out)) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return show(args, content, figures_table(screen.out, figure_rows(found)))


def _add_methods(parser: argparse.ArgumentParser) -> Any:
    add = parser.add_argument
    add("--drafters", type=methods, metavar="LIST", default=DRAFTERS, help=f"methods (default: {DRAFTERS})")
    add("--budget", type=budgets, metavar="LIST", default=str(BUDGET), help=f"positions a pass (default: {BUDGET})")
    add_setting(parser, "memory", str, "SCOPE", "who shares what drafters learn", default=DEFAULTS["memory"])
    return add


def _methods(args: argparse.Namespace) -> list[Any]:
    from draftwood.bench.records import parse_methods

    return parse_methods(args.drafters, args.memory, args.budget)
