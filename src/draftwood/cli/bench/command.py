"""``draftwood bench``: runs methods on the same prompts, interleaved, and writes a report."""

import argparse
import shlex
from datetime import datetime
from pathlib import Path

from draftwood.bench.run import BenchPlan, check_plan, list_absent_peers, make_plan, run_bench
from draftwood.cli.bench import recipes as bench_recipes
from draftwood.cli.bench import results as bench_results
from draftwood.cli.bench.options import typed_settings
from draftwood.cli.bench.tables import print_note
from draftwood.cli.console import Screen
from draftwood.errors import DraftwoodError


def run(args: argparse.Namespace) -> int:
    screen = Screen(args.color)

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
