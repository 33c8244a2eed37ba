"""Results of a benchmark: the final table, ``bench report`` and ``bench diff``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from draftwood.bench.figures import diff_runs, find_pairs, summarize
from draftwood.bench.records import BenchRun, read_run, read_runs
from draftwood.bench.report import (
    format_changes,
    format_results,
    format_summary_json,
    list_doubts,
    list_problems,
    list_remarks,
    summarize_hidden_changes,
    to_json_value,
    write_report,
)
from draftwood.cli.bench.tables import figures_table, print_note
from draftwood.cli.console import BOLD, RED, Screen, show
from draftwood.errors import OptionError


def run_report(args: argparse.Namespace) -> int:
    if len(args.runs) > 1 and not args.out:
        raise OptionError("A report of several folders needs an output folder", next_step="Add --out DIR.")

    return conclude(args, Screen(args.color), Path(args.out or args.runs[0]), read_runs(args.runs))


def conclude(args: argparse.Namespace, screen: Screen, out: Path, runs: Sequence[BenchRun]) -> int:
    """Write the report and print its main figures; return 1 if an output was wrong or a request failed."""

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
    for doubt in (doubt for summary in summaries for doubt in list_doubts(summary)):
        print_note(screen, doubt)
    found = [problem for summary in summaries for problem in list_problems(summary)]
    for problem in found:
        screen.err.write(screen.err(problem, RED) + "\n")
    return 1 if found else 0


def run_diff(args: argparse.Namespace) -> int:
    before, after = read_run(args.before), read_run(args.after)
    pairs = find_pairs(before, after, args.pair)
    changes = diff_runs(before, after, pairs)
    lines = figures_table(Screen(args.color).out, format_changes(changes)) if changes else []
    note = summarize_hidden_changes(changes)
    content = {"changes": to_json_value(changes), "pairs": [{"method": pair.label, **pair._asdict()} for pair in pairs]}
    return show(args, content, [*lines, *([note] if note else [])])
