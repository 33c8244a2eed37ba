"""The main figures of a report for the terminal, and remarks."""

from collections.abc import Callable, Sequence

from draftwood.bench.figures import Cell, Interval, Summary
from draftwood.bench.records import BenchRun
from draftwood.bench.report import text
from draftwood.bench.report.sections import exactness
from draftwood.bench.report.tables import cell, labels


def format_results(summary: Summary) -> list[tuple[str, ...]]:
    """Format a header and one row per method; empty columns are omitted, except speed."""
    fast = summary.baseline is not None
    speed = ("tokens/s", lambda one: _format_number(one.tokens_per_second, 1))
    columns: list[tuple[str, Callable[[Cell], str]]] = [
        ("method", lambda one: one.method),
        ("speed-up", lambda one: _format_number(one.speedup, 2, "x")) if fast else speed,
        ("95%", lambda one: _format_bounds(one, one.speedup if fast else one.tokens_per_second, 2 if fast else 1)),
        ("tau", lambda one: _format_number(one.tau, 2)),
        *([speed] if fast else []),
        ("nodes", lambda one: _format_number(one.nodes, 1)),
        ("output", lambda one: _blank_if_missing(exactness(summary, one).text)),
    ]
    found = [cell(summary, label) for label in labels(summary)]
    filled = [(name, [make(one) for one in found]) for name, make in columns]
    shown = [*filled[:2], *((name, cells) for name, cells in filled[2:] if any(cells))]
    return [tuple(name for name, _ in shown), *zip(*(cells for _, cells in shown), strict=True)]


def list_remarks(runs: Sequence[BenchRun]) -> list[str]:
    """List unfinished runs, the first error of each method, and absent peers."""
    open_runs = [run for run in runs if not run.manifest.finished]
    found = [
        f"not finished: {run.name}; to resume, run its command again with --out and its folder" for run in open_runs
    ]
    for run in runs:
        first = {record.method: record for record in reversed(run.records) if record.error}
        found += [f"{r.method} on {r.task}, {r.prompt}: {' '.join((r.error or '').split())}" for r in first.values()]
    absent = {name: why for run in runs for name, why in run.manifest.absent.items()}
    reasons = {name: " ".join(why.split()) for name, why in absent.items()}
    return found + [why if why.startswith(name) else f"{name} is absent: {why}" for name, why in reasons.items()]


def _format_number(value: Interval | float | None, decimals: int, unit: str = "") -> str:
    return _blank_if_missing(text.number(value, decimals, unit))


def _format_bounds(one: Cell, value: Interval | None, decimals: int) -> str:
    """Format the interval; a single prompt has none."""
    if text.finite(value) is None or value is None or one.prompts < 2:
        return ""
    return f"{value.low:.{decimals}f}-{value.high:.{decimals}f}"


def _blank_if_missing(written: str) -> str:
    return "" if written == text.NOTHING else written
