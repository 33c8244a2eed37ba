"""``draftwood bench``: every method on the same prompts, in turns, and a report."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.cli import bench_results
from draftwood.cli.options import Subparsers, add_command, add_model_options
from draftwood.cli.terminal import Screen

if TYPE_CHECKING:
    from draftwood.bench.records import Run
    from draftwood.bench.runner import Request

_DETAILS = """\
Prompts are those of the package, of a folder of prompt files (--data DIR, one file a task: mt_bench,
humaneval, mbpp, classeval, gsm8k, alpaca, cnn_dm, aime24, livecodebench, spec_bench, ...), or of the
hub (--data hub). A method is a drafter's name, behind a colon its options; memory and budget may be
among them. The folder of --out gets requests.jsonl, report.md, report.html and summary.json. The same
command goes on with a run that was interrupted."""


def register(commands: Subparsers[Any]) -> None:
    parser = add_command(
        commands,
        "bench",
        run,
        "Measure methods side by side, and write a report",
        "draftwood bench",
        "draftwood bench --drafters plain,pld,goose:bypass=copied,goose --budget 60 --data prompts --limit 5",
        "draftwood bench --peers transformers,llamacpp --out runs/peers",
        "draftwood bench --drafters stand,recycling --temperature 0.6 --trajectories 1,4,8,16",
        "draftwood bench --recipe goose-table1 --model smollm2",
        "draftwood bench report runs/a runs/b --out merged",
        "draftwood bench diff runs/before runs/after",
        details=_DETAILS,
    )
    what = parser.add_argument_group("what is measured")
    what.add_argument("--recipe", metavar="NAME", help="a table or figure of a paper, see: draftwood bench recipes")
    what.add_argument("--param", metavar="KEY=VALUE", action="append", default=[], help="what a recipe asks for")
    what.add_argument("--drafters", type=_methods, metavar="LIST", help="methods between commas, plain among them")
    what.add_argument("--peers", type=_methods, metavar="LIST", help="other engines, see: draftwood bench peers")
    what.add_argument("--tasks", type=_words, metavar="LIST", help="tasks between commas (default: all there are)")
    what.add_argument("--data", metavar="DIR", help="folder or file of prompts, or hub (default: the package's own)")
    what.add_argument("--limit", type=int, metavar="N", help="prompts of each task (default: all)")
    what.add_argument("--repeats", type=int, metavar="N", help="how often each prompt is answered (default: 1)")
    what.add_argument("--trajectories", type=_numbers, metavar="LIST", help="samples of each prompt, as in 1,4,8,16")
    what.add_argument("--budget", type=_budgets, metavar="LIST", help="positions per pass, auto, or several (8,16,60)")
    what.add_argument("--memory", metavar="SCOPE", help="who shares what drafters learn (default: prompt)")
    what.add_argument("--batch", type=int, metavar="N", help="prompts that run together (default: 1)")
    what.add_argument("--raw", action="store_true", default=None, help="continue texts: no chat template")
    add_model_options(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-tokens", type=int, metavar="N", help="tokens of each answer (default: 128)")
    sampling.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: 0)")
    sampling.add_argument("--top-p", type=float, metavar="P", help="default: 1")
    sampling.add_argument("--top-k", type=int, metavar="K", help="default: 0, all")
    sampling.add_argument("--seed", type=int, metavar="N", help="same seed, same draws (default: 0)")
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="always make that many tokens")
    parser.add_argument("--out", metavar="DIR", help="folder of the results (default: a new one, bench-DATE-TIME)")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object on stdout")
    bench_results.register(parser.add_subparsers(title="commands", metavar="COMMAND", required=False))


def run(args: argparse.Namespace) -> int:
    screen = Screen(args.color)
    from draftwood.bench.runner import run_bench

    out = Path(args.out or f"bench-{datetime.now():%Y%m%d-%H%M%S}")
    runs: list[Run] = []
    for request in _requests(args, out, screen):
        screen.note(f"results go to {request.folder}")
        try:
            runs.append(run_bench(request, screen.progress, screen.note))
        except KeyboardInterrupt:
            screen.progress.clear()
            screen.note(f"Interrupted. What was measured is in {request.folder}; --out {out} goes on from there.")
            raise
    return bench_results.conclude(args, screen, out, runs)


def _requests(args: argparse.Namespace, out: Path, screen: Screen) -> list[Request]:
    """One run, or those of a recipe."""
    from draftwood.bench.runner import Request
    from draftwood.bench.settings import Settings

    given = {f.name: getattr(args, f.name, None) for f in fields(Settings)}
    typed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    command = shlex.join(["draftwood", *sys.argv[1:]])
    if args.recipe is None:
        return [Request(settings=Settings.from_dict(typed), folder=out, command=command)]
    from draftwood.bench.recipes import load_recipe

    recipe = load_recipe(args.recipe, dict(pair.partition("=")[::2] for pair in args.param))
    recipe.check(typed)
    for reason in recipe.left_out():
        screen.note(reason)
    return [
        Request(
            settings=recipe.settings_for(part, typed),
            folder=out / part.name if len(recipe.runs) > 1 else out,
            command=command,
            recipe=recipe.name,
            paper=recipe.figures_for(part, typed),
        )
        for part in recipe.runs
    ]


def _methods(text: str) -> list[str]:
    from draftwood.bench.methods import split_methods

    return split_methods(text)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    return [int(word) for word in _words(text)]


def _budgets(text: str) -> Sequence[int | str]:
    return [word if word == "auto" else int(word) for word in _words(text)]
