"""What came of a benchmark: the table at its end, ``bench report`` and ``bench diff``; and what can be measured."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftwood.cli import bench_replay
from draftwood.cli.options import Subparsers, add_command
from draftwood.cli.report import show, table
from draftwood.cli.terminal import BOLD, RED, Screen

if TYPE_CHECKING:
    from draftwood.bench.records import Run
    from draftwood.bench.summary import Cell, Interval, Summary


def register(commands: Subparsers[Any]) -> None:
    report = add_command(
        commands,
        "report",
        run_report,
        "Write the report of one or several runs",
        "draftwood bench report runs/a",
        "draftwood bench report runs/a runs/b --out merged",
    )
    report.add_argument("runs", nargs="+", metavar="RUN", help="a folder that bench made, or one of several such")
    report.add_argument("--out", metavar="DIR", help="where the report goes (default: the first run's folder)")
    report.add_argument("--json", action="store_true", help="the figures as one JSON object on stdout")
    diff = add_command(
        commands,
        "diff",
        run_diff,
        "What got faster or slower from one run to another, and whether that is more than noise",
        "draftwood bench diff runs/before runs/after",
    )
    diff.add_argument("before", metavar="BEFORE")
    diff.add_argument("after", metavar="AFTER")
    diff.add_argument("--json", action="store_true", help="one JSON object on stdout")
    recipes = add_command(
        commands, "recipes", run_recipes, "List the recipes: tables and figures of papers", "draftwood bench recipes"
    )
    recipes.add_argument("--json", action="store_true", help="one JSON object on stdout")
    peers = add_command(
        commands,
        "peers",
        run_peers,
        "List other engines and whether they are there, or install one",
        "draftwood bench peers",
        "draftwood bench peers --install vllm",
    )
    peers.add_argument("--install", metavar="ENGINE", help="make an environment of its own for it")
    peers.add_argument("--json", action="store_true", help="one JSON object on stdout")
    bench_replay.register(commands)


def run_report(args: argparse.Namespace) -> int:
    from draftwood.bench.records import read_runs

    runs = read_runs(args.runs)
    return conclude(args, Screen(args.color), Path(args.out or args.runs[0]), runs)


def conclude(args: argparse.Namespace, screen: Screen, out: Path, runs: Sequence[Run]) -> int:
    """Writes the report and shows its main figures; 1 if an output was wrong or a method failed."""
    from draftwood.bench.metrics import summarise
    from draftwood.bench.records import ERROR
    from draftwood.bench.report import summary_json, write_report

    summaries = summarise(runs)
    paths = write_report(out, runs)
    if args.json:
        print(summary_json(summaries), end="")
    else:
        for summary in summaries:
            print("\n".join([screen.out(summary.title, BOLD), *table(screen.out, _rows(summary)), ""]))
    for path in paths:
        screen.note(f"wrote {path}")
    wrong = sum(cell.lossless.get(ERROR, 0) for s in summaries for (_, task), cell in s.cells.items() if task == "*")
    failed = {label: why for run in runs for label, why in run.manifest.failed.items()}
    absent = {name: why for run in runs for name, why in run.manifest.absent.items()}
    for name, why in absent.items():
        screen.note(f"absent: {name}: {why}")
    for label, why in failed.items():
        screen.err.write(screen.err(f"failed: {label}: {why}", RED) + "\n")
    if wrong:
        screen.err.write(
            screen.err(f"{wrong} outputs differ from plain decoding: an error, see the report", RED) + "\n"
        )
    return 1 if wrong or failed else 0


def _rows(summary: Summary) -> list[tuple[str, ...]]:
    header = ("method", "speed-up", "95%", "tau", "tokens/s", "nodes", "output")
    return [header, *(_row(summary.cells[method["label"], "*"]) for method in summary.methods)]


def _row(cell: Cell) -> tuple[str, ...]:
    speed = cell.speedup
    return (
        cell.method,
        _figure(speed, "x"),
        "" if speed is None or cell.prompts < 2 else f"{speed.low:.2f}-{speed.high:.2f}",
        _figure(cell.tau),
        "" if cell.tokens_per_second is None else f"{cell.tokens_per_second.value:.1f}",
        "" if cell.nodes is None else f"{cell.nodes:.1f}",
        ", ".join(f"{count} {verdict}" for verdict, count in cell.lossless.items()),
    )


def _figure(interval: Interval | None, unit: str = "") -> str:
    return "" if interval is None else f"{interval.value:.2f}{unit}"


def run_diff(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from draftwood.bench.diff import diff_lines, diff_runs
    from draftwood.bench.records import read_run

    changes = diff_runs(read_run(args.before), read_run(args.after))
    return show(args, {"changes": [asdict(change) for change in changes]}, diff_lines(changes))


def run_recipes(args: argparse.Namespace) -> int:
    from draftwood.bench.recipes import load_recipe, recipe_names

    recipes = [load_recipe(name) for name in recipe_names()]
    rows = [
        (r.name, f"{r.paper}, {r.item}", r.title + (f" (needs {', '.join(r.needs)})" if r.needs else ""))
        for r in recipes
    ]
    content = {"recipes": [{"name": name, "item": item, "title": title} for name, item, title in rows]}
    return show(args, content, table(Screen(args.color).out, rows))


def run_peers(args: argparse.Namespace) -> int:
    from draftwood.bench.peers import PEERS, absent, install_peer

    screen = Screen(args.color)
    if args.install:
        place = install_peer(args.install, screen.progress)
        screen.note(f"{args.install} is in {place}")
    rows = [(name, absent(spec) or "there") for name, spec in PEERS.items()]
    return show(args, {"peers": dict(rows)}, table(screen.out, rows))
