"""``draftwood bench record`` and ``draftwood bench replay``: runs written down, and drafters tried on them again."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftwood.cli.options import Subparsers, add_command, add_model_options
from draftwood.cli.report import show, table
from draftwood.cli.terminal import Screen
from draftwood.config import SamplingParams
from draftwood.files import new_file

_RECORDS = "The more drafters record, the more of what another one would guess is known when it is replayed."
_AGAIN = """\
No model runs. A method that was recorded comes out as it ran. 'known' is the share of wrong guesses
whose rows were recorded: where it is small, tau comes out too low; record more drafters or --estimate.
Long contexts are synthetic: the texts of other prompts stand before each prompt."""


def register(commands: Subparsers[Any]) -> None:
    register_record(commands)
    register_replay(commands)


def register_record(commands: Subparsers[Any]) -> None:
    line = "draftwood bench record --drafters goose,recycling --tasks humaneval --data prompts --out code.recording"
    parser = add_command(commands, "record", run_record, "Write down runs to replay", line, details=_RECORDS)
    add = _add_methods(parser)
    add("--tasks", type=lambda text: text.split(","), metavar="LIST", default=[], help="default: all there are")
    add("--data", metavar="DIR", help="folder or file of prompts, or hub (default: the package's own)")
    add("--limit", type=int, metavar="N", help="prompts of each task (default: all)")
    add("--samples", type=int, metavar="N", default=1, help="answers to each prompt (default: 1)")
    add("--max-tokens", type=int, metavar="N", default=128, help="tokens of each answer (default: 128)")
    add("--temperature", type=float, metavar="T", default=0.0, help="0 is greedy (default: 0)")
    add("--seed", type=int, metavar="N", default=0, help="same seed, same draws (default: 0)")
    add("--width", type=int, metavar="K", default=16, help="tokens kept of each row of logits (default: 16)")
    add("--out", metavar="FILE", required=True, help="the file, as in code.recording")
    add_model_options(parser)


def register_replay(commands: Subparsers[Any]) -> None:
    line = "draftwood bench replay code.recording --drafters goose,recycling"
    more = (f"{line} --budget 8,16,32,60", f"{line} --context 1024,4096,16384,32768", f"{line} --trajectories 1,4,16")
    add = _add_methods(add_command(commands, "replay", run_replay, "Draft recorded texts again", *more, details=_AGAIN))
    add("recording", metavar="FILE", help="what bench record wrote")
    add("--context", type=_numbers, metavar="LIST", default=[], help="behind contexts of so many tokens")
    add("--trajectories", type=_numbers, metavar="LIST", default=[], help="over the first so many samples of a prompt")
    add("--estimate", action="store_true", help="unknown rows: take those of the nearest context that ends alike")
    add("--json", action="store_true", help="one JSON object on stdout")
    add("--out", metavar="FILE", help="the same object into a file")


def run_record(args: argparse.Namespace) -> int:
    screen, methods, path = Screen(args.color), _methods(args), Path(args.out)
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed, n=args.samples)
    from draftwood.bench.replay import record_to
    from draftwood.bench.tasks import load_tasks

    tasks = load_tasks(args.tasks, args.data, args.limit, screen.progress)
    how = {name: getattr(args, name) for name in ("width", "dtype", "device", "target")}
    recording = record_to(path, args.model, methods, tasks, params, **how, progress=screen.progress, note=screen.note)
    print(f"{recording.summary()}, {path.stat().st_size / 1e6:.1f} MB: {path}")
    return 0


def run_replay(args: argparse.Namespace) -> int:
    screen, methods = Screen(args.color), _methods(args)
    from draftwood.bench.replay import figure_notes, figure_rows, load_recording, replay_methods

    recording, study = load_recording(args.recording), {"contexts": args.context, "trajectories": args.trajectories}
    found = replay_methods(recording, methods, **study, estimate=args.estimate, progress=screen.progress)
    content = {"recording": args.recording, "model": recording.target.name, "figures": [asdict(f) for f in found]}
    for note in figure_notes(found):
        screen.note(note)
    if args.out:
        with new_file(Path(args.out)) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return show(args, content, table(screen.out, figure_rows(found)))


def _add_methods(parser: argparse.ArgumentParser) -> Any:
    parser.add_argument("--drafters", metavar="LIST", default="goose,recycling", help="default: goose,recycling")
    parser.add_argument("--budget", type=_numbers, metavar="LIST", default="60", help="positions a pass (default: 60)")
    parser.add_argument("--memory", metavar="SCOPE", default="prompt", help="who shares tables (default: prompt)")
    return parser.add_argument


def _methods(args: argparse.Namespace) -> list[Any]:
    from draftwood.bench.methods import parse_methods, split_methods

    return parse_methods(split_methods(args.drafters), args.memory, args.budget)


def _numbers(text: str) -> list[Any]:
    return [word if word == "auto" else int(word) for word in text.split(",")]
