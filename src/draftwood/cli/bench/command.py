"""``draftwood bench``: runs methods on the same prompts, interleaved, and writes a report."""

from __future__ import annotations

import argparse
import shlex
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.cli.bench import peers as bench_peers
from draftwood.cli.bench import recipes as bench_recipes
from draftwood.cli.bench import replay as bench_replay
from draftwood.cli.bench import results as bench_results
from draftwood.cli.bench.options import add_prompt_settings, add_setting, budgets, methods, numbers, typed_settings
from draftwood.cli.bench.tables import print_note
from draftwood.cli.console import Screen, Subparsers, add_command, add_model_options
from draftwood.errors import DraftwoodError

if TYPE_CHECKING:
    from draftwood.bench.run import BenchPlan

_DETAILS = """\
A method is a drafter name (see: draftwood drafters), followed by a colon and
its options, which may include memory and budget. Keep plain in the list:
speed-ups are relative to it, and outputs are compared with its outputs.

Prompts are the bundled ones (tasks chat, code, edit, math, summary), those of
a folder with one file per task, published (mt_bench, humaneval, mbpp, gsm8k,
classeval, alpaca, cnn_dm, aime24, livecodebench, spec_bench) or your own, or
those of the hub. Recipes use tasks of papers: they need --data.

Results in the --out folder: run.json, requests.jsonl, report.md, report.html
and summary.json. The same command with the same --out resumes an interrupted
run. The exit code is 1 if an output differs from plain decoding or a request
failed."""
_EXAMPLES = (
    "draftwood bench --limit 2",
    "draftwood bench --drafters plain,pld,goose:bypass=copied,goose --budget 60 --data prompts --limit 5",
    "draftwood bench --peers transformers,llamacpp --out runs/peers",
    "draftwood bench --drafters plain,stand,recycling --temperature 0.6 --trajectories 1,4,8,16",
    "draftwood bench --recipe goose-table1 --data hub --limit 3 --max-tokens 160 --out runs/table1",
    "draftwood bench report runs/a runs/b --out merged",
    "draftwood bench diff runs/before runs/after",
)


def register(commands: Subparsers[Any]) -> None:
    summary = "Benchmark methods on the same prompts, and write a report"
    parser = add_command(commands, "bench", run, summary, *_EXAMPLES, details=_DETAILS)
    what = parser.add_argument_group("measurement")
    what.add_argument("--recipe", metavar="NAME", help="table or figure of a paper, see: draftwood bench recipes")
    what.add_argument(
        "--param", metavar="KEY=VALUE", action="append", default=[], help="parameter of a recipe; repeatable"
    )
    add_setting(what, "drafters", methods, "LIST", "comma-separated methods")
    add_setting(what, "peers", methods, "LIST", "other engines, see: draftwood bench peers")
    add_prompt_settings(what)
    add_setting(what, "repeats", int, "N", "runs of each method per prompt")
    add_setting(what, "trajectories", numbers, "LIST", "samples per prompt, as in 1,4,8,16")
    add_setting(what, "budget", budgets, "LIST", "positions per pass; several values give a curve (8,16,60)")
    add_setting(what, "memory", str, "SCOPE", "scope of what drafters learn: request, prompt or process")
    add_setting(what, "batch", int, "N", "prompts per batch")
    what.add_argument(
        "--raw", action="store_true", default=None, help="continue the prompt as text, without a chat template"
    )
    add_model_options(parser)
    sampling = parser.add_argument_group("sampling")
    add_setting(sampling, "max_tokens", int, "N", "maximum number of output tokens")
    add_setting(sampling, "temperature", float, "T", "0 is greedy, higher is more random")
    add_setting(sampling, "top_p", float, "P", "nucleus sampling: smallest set of top tokens with this probability")
    add_setting(sampling, "top_k", int, "K", "sample from the K most likely tokens, 0: all")
    add_setting(sampling, "seed", int, "N", "random seed")
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="always generate --max-tokens tokens")
    parser.add_argument("--out", metavar="DIR", help="results folder (default: a new folder bench-DATE-TIME)")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    more = parser.add_subparsers(title="commands", metavar="COMMAND", required=False)
    for command in (bench_results, bench_recipes, bench_peers, bench_replay):
        command.register(more)


def run(args: argparse.Namespace) -> int:
    screen = Screen(args.color)
    from draftwood.bench.run import check_plan, list_absent_peers, make_plan, run_bench

    out = Path(args.out or f"bench-{datetime.now():%Y%m%d-%H%M%S}")
    command = shlex.join(["draftwood", *args.argv])
    plan = make_plan(typed_settings(args), out, command, args.recipe, args.param)
    bench_recipes.introduce(screen, plan.recipe)
    check_plan(plan, screen.progress)
    for why in list_absent_peers(plan):
        print_note(screen, why)
    runs = []
    try:
        for spec in plan.runs:
            print_note(screen, f"writing results to {spec.folder}")
            runs.append(run_bench(spec, screen.progress, lambda text: print_note(screen, text)))
    except (KeyboardInterrupt, DraftwoodError) as error:
        _print_how_to_resume(args, screen, plan, out, command, interrupted=isinstance(error, KeyboardInterrupt))
        raise
    code = bench_results.conclude(args, screen, out, runs)
    bench_recipes.conclude(screen, plan.recipe)
    return code


def _print_how_to_resume(
    args: argparse.Namespace, screen: Screen, plan: BenchPlan, out: Path, command: str, *, interrupted: bool
) -> None:
    """Print the command that resumes the run. With --out, repeating the command suffices."""
    screen.progress.clear()
    if plan.has_begun and (interrupted or not args.out):
        again = command if args.out else f"{command} --out {shlex.quote(str(out))}"
        screen.note(f"The results so far are in {out}. To resume:\n  {again}")
        screen.note(f"To show them:\n  draftwood bench report {shlex.quote(str(out))}")
    elif interrupted:
        screen.note("No results yet.")
