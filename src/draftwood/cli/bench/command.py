"""``draftwood bench``: every method on the same prompts, in turns, and a report."""

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
A method is a drafter's name (draftwood drafters), behind a colon its options;
memory and budget may be among them. Keep plain: speed-ups are over it, and
outputs are compared with its own.

Prompts are the package's own (tasks chat, code, edit, math, summary), those of
a folder with one file a task, as published (mt_bench, humaneval, mbpp, gsm8k,
classeval, alpaca, cnn_dm, aime24, livecodebench, spec_bench) or yours, or those
of the hub. Recipes name tasks of papers: they need --data.

The folder of --out gets run.json, requests.jsonl, report.md, report.html and
summary.json. The same command with the same --out goes on with a run that was
interrupted. The exit code is 1 if an output was not that of plain decoding or
a request failed."""
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
    summary = "Measure methods side by side, and write a report"
    parser = add_command(commands, "bench", run, summary, *_EXAMPLES, details=_DETAILS)
    what = parser.add_argument_group("what is measured")
    what.add_argument("--recipe", metavar="NAME", help="a table or figure of a paper, see: draftwood bench recipes")
    what.add_argument("--param", metavar="KEY=VALUE", action="append", default=[], help="what a recipe asks for")
    add_setting(what, "drafters", methods, "LIST", "methods between commas")
    add_setting(what, "peers", methods, "LIST", "other engines, see: draftwood bench peers")
    add_prompt_settings(what)
    add_setting(what, "repeats", int, "N", "how often each prompt is answered")
    add_setting(what, "trajectories", numbers, "LIST", "samples of each prompt, as in 1,4,8,16")
    add_setting(what, "budget", budgets, "LIST", "positions per pass; several make a curve (8,16,60)")
    add_setting(what, "memory", str, "SCOPE", "who shares what drafters learn: request, prompt or process")
    add_setting(what, "batch", int, "N", "prompts that run together")
    what.add_argument("--raw", action="store_true", default=None, help="continue texts: no chat template")
    add_model_options(parser)
    sampling = parser.add_argument_group("sampling")
    add_setting(sampling, "max_tokens", int, "N", "tokens of each answer at most")
    add_setting(sampling, "temperature", float, "T", "0 is greedy, higher is more varied")
    add_setting(sampling, "top_p", float, "P", "only the likeliest tokens that share this much probability")
    add_setting(sampling, "top_k", int, "K", "only the K likeliest tokens, 0: all")
    add_setting(sampling, "seed", int, "N", "same seed, same draws")
    sampling.add_argument("--ignore-eos", action="store_true", default=None, help="always make that many tokens")
    parser.add_argument("--out", metavar="DIR", help="folder of the results (default: a new one, bench-DATE-TIME)")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object on stdout")
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
            print_note(screen, f"results go to {spec.folder}")
            runs.append(run_bench(spec, screen.progress, lambda text: print_note(screen, text)))
    except (KeyboardInterrupt, DraftwoodError) as error:
        _tell_how_to_go_on(args, screen, plan, out, command, interrupted=isinstance(error, KeyboardInterrupt))
        raise
    code = bench_results.conclude(args, screen, out, runs)
    bench_recipes.conclude(screen, plan.recipe)
    return code


def _tell_how_to_go_on(
    args: argparse.Namespace, screen: Screen, plan: BenchPlan, out: Path, command: str, *, interrupted: bool
) -> None:
    """Of an error only where its own advice, the same command, would make a new folder."""
    screen.progress.clear()
    if plan.has_begun and (interrupted or not args.out):
        again = command if args.out else f"{command} --out {shlex.quote(str(out))}"
        screen.note(f"{out} has what was measured. To go on:\n  {again}")
        screen.note(f"To see what there is:\n  draftwood bench report {shlex.quote(str(out))}")
    elif interrupted:
        screen.note("Nothing was measured yet.")
