"""The main figures of a report for a terminal: short rows, and what is said below them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftwood.bench.figures import Cell, Interval, Summary
from draftwood.bench.records import BenchRun
from draftwood.bench.report import text
from draftwood.bench.report.sections import exactness
from draftwood.bench.report.tables import cell, labels


def format_results(summary: Summary) -> list[tuple[str, ...]]:
    """A heading and a row a method; but for the speed, columns that nobody has a figure for are left out."""
    fast = summary.baseline is not None
    speed = ("tokens/s", lambda one: _number(one.tokens_per_second, 1))
    columns: list[tuple[str, Callable[[Cell], str]]] = [
        ("method", lambda one: one.method),
        ("speed-up", lambda one: _number(one.speedup, 2, "x")) if fast else speed,
        ("95%", lambda one: _bounds(one, one.speedup if fast else one.tokens_per_second, 2 if fast else 1)),
        ("tau", lambda one: _number(one.tau, 2)),
        *([speed] if fast else []),
        ("nodes", lambda one: _number(one.nodes, 1)),
        ("output", lambda one: _known(exactness(summary, one).text)),
    ]
    found = [cell(summary, label) for label in labels(summary)]
    filled = [(name, [make(one) for one in found]) for name, make in columns]
    shown = [*filled[:2], *((name, cells) for name, cells in filled[2:] if any(cells))]
    return [tuple(name for name, _ in shown), *zip(*(cells for _, cells in shown), strict=True)]


def list_remarks(runs: Sequence[BenchRun]) -> list[str]:
    """Beside the figures: runs that are not finished, why requests failed, peers that are not there."""
    open_runs = [run for run in runs if not run.manifest.finished]
    found = [
        f"not finished: {run.name}; to go on, give its command again with --out to its folder" for run in open_runs
    ]
    for run in runs:
        first = {record.method: record for record in reversed(run.records) if record.error}
        found += [f"{r.method} on {r.task}, {r.prompt}: {' '.join((r.error or '').split())}" for r in first.values()]
    absent = {name: why for run in runs for name, why in run.manifest.absent.items()}
    reasons = {name: " ".join(why.split()) for name, why in absent.items()}
    return found + [why if why.startswith(name) else f"{name} is absent: {why}" for name, why in reasons.items()]


def _number(value: Interval | float | None, decimals: int, unit: str = "") -> str:
    return _known(text.number(value, decimals, unit))


def _bounds(one: Cell, value: Interval | None, decimals: int) -> str:
    """Of a single prompt there is none."""
    if text.finite(value) is None or value is None or one.prompts < 2:
        return ""
    return f"{value.low:.{decimals}f}-{value.high:.{decimals}f}"


def _known(written: str) -> str:
    return "" if written == text.NOTHING else written
