"""Results of a benchmark: the final table, ``bench report`` and ``bench diff``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.cli.bench.tables import figures_table, print_note
from draftwood.cli.console import BOLD, RED, Screen, Subparsers, add_command, show
from draftwood.errors import OptionError

if TYPE_CHECKING:
    from draftwood.bench.records import BenchRun

_DIFF_DETAILS = """\
Compares the prompts that both runs have. A change is significant if its 99%
interval excludes 1, it is more than 1%, and there are at least 5 prompts.
Speed-ups over plain are comparable between days, tokens per second are not.

Methods with the same label in both runs are compared. --pair compares methods
with different labels, such as two heads, or two methods of the same run."""


def register(commands: Subparsers[Any]) -> None:
    report = add_command(
        commands,
        "report",
        run_report,
        "Write the report of one or more runs, finished or not",
        "draftwood bench report runs/a",
        "draftwood bench report runs/a runs/b --out merged",
        details="Runs with the same model, machine and sampling are pooled; others get a chapter each.",
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or a folder of runs")
    report.add_argument("--out", metavar="DIR", help="folder of the report (default: the run folder, if there is one)")
    report.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    diff = add_command(
        commands,
        "diff",
        run_diff,
        "Compare two runs: what got faster or slower, and whether it is significant",
        "draftwood bench diff runs/before runs/after",
        "draftwood bench diff runs/a runs/b --pair eagle2:head=r/hass/head,budget=60 eagle2:head=r/talf/head,budget=60",
        "draftwood bench diff runs/a runs/a --pair hass talf --pair pld talf",
        details=_DIFF_DETAILS,
    )
    diff.add_argument("before", metavar="BEFORE", help="a run folder")
    diff.add_argument("after", metavar="AFTER", help="another run folder, or the same to compare two of its methods")
    diff.add_argument(
        "--pair",
        nargs=2,
        metavar=("OLD", "NEW"),
        action="append",
        default=[],
        help="compare only method OLD of BEFORE with method NEW of AFTER: labels, their beginnings, or unique parts; "
        "repeatable",
    )
    diff.add_argument("--json", action="store_true", help="print one JSON object")


def run_report(args: argparse.Namespace) -> int:
    if len(args.runs) > 1 and not args.out:
        raise OptionError("A report of several folders needs an output folder", next_step="Add --out DIR.")
    from draftwood.bench.records import read_runs

    return conclude(args, Screen(args.color), Path(args.out or args.runs[0]), read_runs(args.runs))


def conclude(args: argparse.Namespace, screen: Screen, out: Path, runs: Sequence[BenchRun]) -> int:
    """Write the report and print its main figures; return 1 if an output was wrong or a request failed."""
    from draftwood.bench.figures import summarize
    from draftwood.bench.report import format_results, format_summary_json, list_problems, list_remarks, write_report

    summaries = summarize(runs)
    paths = write_report(out, summaries)
    if args.json:
        print(format_summary_json(summaries), end="")
    else:
        for summary in summaries:
            print("\n".join([screen.out(summary.title, BOLD), *figures_table(screen.out, format_results(summary)), ""]))
    for path in paths:
        print_note(screen, f"wrote {path}")
    for remark in list_remarks(runs):
        print_note(screen, remark)
    found = [problem for summary in summaries for problem in list_problems(summary)]
    for problem in found:
        screen.err.write(screen.err(problem, RED) + "\n")
    return 1 if found else 0


def run_diff(args: argparse.Namespace) -> int:
    from draftwood.bench.figures import diff_runs, find_pairs
    from draftwood.bench.records import read_run
    from draftwood.bench.report import format_changes, summarize_hidden_changes, to_json_value

    before, after = read_run(args.before), read_run(args.after)
    pairs = find_pairs(before, after, args.pair)
    changes = diff_runs(before, after, pairs)
    lines = figures_table(Screen(args.color).out, format_changes(changes)) if changes else []
    note = summarize_hidden_changes(changes)
    content = {
        "changes": to_json_value(changes),
        "pairs": [{"method": pair.label, **pair._asdict()} for pair in pairs],
    }
    return show(args, content, [*lines, *([note] if note else [])])
