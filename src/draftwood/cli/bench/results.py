"""What came of a benchmark: the table at its end, ``bench report`` and ``bench diff``."""

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

_NOISE = """\
Compared are the prompts that both runs have. A change counts if its 99%
interval leaves out 1, it is more than 1%, and there are at least 5 prompts.
Speed-ups over plain travel from one day to another, tokens per second do not.

Methods are compared that have the same label in both runs. --pair compares two
with different labels: two heads, say, or two methods of one and the same run."""


def register(commands: Subparsers[Any]) -> None:
    report = add_command(
        commands,
        "report",
        run_report,
        "Write the report of one or several runs, finished or not",
        "draftwood bench report runs/a",
        "draftwood bench report runs/a runs/b --out merged",
        details="Runs of one model, machine and way of sampling are pooled; others get a chapter each.",
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="a folder that bench made, or a folder of such")
    report.add_argument("--out", metavar="DIR", help="where the report goes (default: the folder, if it is one)")
    report.add_argument("--json", action="store_true", help="the figures as one JSON object on stdout")
    diff = add_command(
        commands,
        "diff",
        run_diff,
        "What got faster or slower from one run to another, and whether that is more than noise",
        "draftwood bench diff runs/before runs/after",
        "draftwood bench diff runs/a runs/b --pair eagle2:head=r/hass/head,budget=60 eagle2:head=r/talf/head,budget=60",
        "draftwood bench diff runs/a runs/a --pair hass talf --pair pld talf",
        details=_NOISE,
    )
    diff.add_argument("before", metavar="BEFORE", help="a folder that bench made")
    diff.add_argument("after", metavar="AFTER", help="another; the same to compare two of its methods")
    diff.add_argument(
        "--pair",
        nargs=2,
        metavar=("OLD", "NEW"),
        action="append",
        default=[],
        help="compare method OLD of BEFORE with method NEW of AFTER, and only these: labels, their beginnings, or a "
        "part that one label alone has; repeatable",
    )
    diff.add_argument("--json", action="store_true", help="one JSON object on stdout")


def run_report(args: argparse.Namespace) -> int:
    if len(args.runs) > 1 and not args.out:
        raise OptionError("A report of several folders needs a place of its own", next_step="Add --out DIR.")
    from draftwood.bench.records import read_runs

    return conclude(args, Screen(args.color), Path(args.out or args.runs[0]), read_runs(args.runs))


def conclude(args: argparse.Namespace, screen: Screen, out: Path, runs: Sequence[BenchRun]) -> int:
    """Writes the report and shows its main figures; 1 if an output was wrong or something failed."""
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
    found = [trouble for summary in summaries for trouble in list_problems(summary)]
    for trouble in found:
        screen.err.write(screen.err(trouble, RED) + "\n")
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
