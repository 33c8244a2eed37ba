"""Computes figures from records: every method on every task, relative to plain decoding of the same prompts.

Speeds and acceptance lengths are ratios of sums: all tokens over all seconds, all tokens over all passes. A speed-up
compares a method with plain decoding on the requests that both finished in the same run. Runs may be pooled, but times
of different runs are never paired.

The row over all tasks (``ALL_TASKS``) is the arithmetic mean of the tasks' figures for tokens/s, speed-ups, tau,
positions per pass, time to first token and tau by trajectories. If a method lacks a task that others have, it has no
mean. Counts are summed, and ratios of counts (acceptance by depth and source, p_s, p_t, routes, time per stage) are
computed from the counts of all tasks.

Intervals come from bootstrap.py, those of times over prompts, repeats and turns. A task with one request has an
interval of zero width: ``low == high == value``.
"""

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from draftwood.bench.figures.bootstrap import (
    Array,
    cluster_table,
    group_timings,
    interval,
    mean_of_strata,
    paired_speedup,
    ratio_of_sums,
)
from draftwood.bench.figures.pooling import (
    group_runs,
    is_plain,
    list_methods,
    make_titles,
    merge_manifests,
    merge_methods,
)
from draftwood.bench.figures.summary import ALL_TASKS, Cell, Summary
from draftwood.bench.records import DIFFERENT, ERROR, IDENTICAL, TIE, BenchRun, RequestKey, RequestRecord
from draftwood.engine import BRANCH_SOURCE, SPINE_SOURCE

VERDICTS = (IDENTICAL, TIE, DIFFERENT, ERROR)  # from harmless to wrong
CYCLE_PARTS = ("draft", "verify", "accept")
INTERVALS = ("tokens_per_second", "speedup", "whole_speedup", "tau")
_TIMED_PARTS = {*CYCLE_PARTS, "prefill", "total"}
Figure = str | int  # a field of Cell; a number n: tau over n trajectories


class PlacedRecord(NamedTuple):
    """A record and the index of its run; names of runs need not be unique."""

    run: int
    record: RequestRecord

    @property
    def pair(self) -> Hashable:
        """Equal for the same request of two methods."""
        return (self.run, *self.record.key[1:])

    @property
    def cluster(self) -> Hashable:
        """The bootstrap cluster: outputs for one prompt are similar, across repeats and runs too."""
        return self.record.prompt

    @property
    def timing_cluster(self) -> Hashable:
        """The cluster for timings: the prompts of a batch share their time."""
        return self.record.batch or self.record.prompt


def summarize(runs: Sequence[BenchRun]) -> list[Summary]:
    """Summarize the runs, one summary per group of comparable runs."""
    groups = group_runs(runs)
    names = make_titles([group[0].manifest for group in groups])
    return [_build_summary(name, group) for name, group in zip(names, groups, strict=True)]


def latest_records(records: Iterable[RequestRecord]) -> dict[RequestKey, RequestRecord]:
    """Index the records of one run. If a request was repeated after an interruption, the last record counts."""
    return {record.key: record for record in records}


# --- cells ------------------------------------------------------------------------------------------------------------


def _build_summary(title: str, runs: Sequence[BenchRun]) -> Summary:
    methods, labels = merge_methods(runs)
    tasks = list(dict.fromkeys(task for run in runs for task in run.manifest.tasks))
    by_cell: dict[tuple[str, str], list[PlacedRecord]] = {}
    plain: dict[Hashable, RequestRecord] = {}
    for number, run in enumerate(runs):
        baseline = next((method["label"] for method in list_methods(run) if is_plain(method)), None)
        for record in latest_records(run.records).values():
            placed = PlacedRecord(number, record)
            by_cell.setdefault((labels[number][record.method], record.task), []).append(placed)
            if record.method == baseline and record.error is None:
                plain[placed.pair] = record
    tasks += sorted({task for _, task in by_cell} - set(tasks))
    return Summary(
        title=title,
        manifest=merge_manifests([run.manifest for run in runs]),
        runs=[run.name for run in runs],
        baseline=next((method["label"] for method in methods if is_plain(method)), None),
        methods=methods,
        tasks=tasks,
        cells=_build_cells([method["label"] for method in methods], tasks, by_cell, plain, runs[0].manifest.settings),
    )


def _build_cells(
    labels: Sequence[str],
    tasks: Sequence[str],
    by_cell: Mapping[tuple[str, str], list[PlacedRecord]],
    plain: Mapping[Hashable, RequestRecord],
    settings: Mapping[str, Any],
) -> dict[tuple[str, str], Cell]:
    """Build a cell for every method and task, with or without records, and one over all tasks."""
    batch, trajectories = int(settings.get("batch", 1)), settings.get("trajectories", ())
    figures = {
        (label, task): _compute_figures(task, _select_finished(by_cell.get((label, task), ())), plain, trajectories)
        for label in labels
        for task in tasks
    }
    reported: dict[Figure, list[str]] = {}  # the tasks for which any method has the figure
    for name in dict.fromkeys(name for found in figures.values() for name in found):
        reported[name] = [task for task in tasks if any(name in figures[label, task] for label in labels)]
    cells: dict[tuple[str, str], Cell] = {}
    for label in labels:
        everything = {task: [placed.record for placed in by_cell.get((label, task), ())] for task in tasks}
        means = {
            name: mean_of_strata([figures[label, task][name] for task in places])
            for name, places in reported.items()
            if all(name in figures[label, task] for task in places)  # means over different tasks are not comparable
        }
        for task, found in everything.items():
            cells[label, task] = Cell(
                method=label, task=task, **_to_fields(figures[label, task]), **_count_fields(found, batch)
            )
        pooled_records = [record for found in everything.values() for record in found]
        cells[label, ALL_TASKS] = Cell(
            method=label, task=ALL_TASKS, **_to_fields(means), **_count_fields(pooled_records, batch)
        )
    return cells


def _select_finished(everything: Sequence[PlacedRecord]) -> list[PlacedRecord]:
    return [placed for placed in everything if placed.record.error is None]


# --- figures ----------------------------------------------------------------------------------------------------------


def _compute_figures(
    task: str, finished: Sequence[PlacedRecord], plain: Mapping[Hashable, RequestRecord], trajectories: Sequence[int]
) -> dict[Figure, Array]:
    """Compute the figures that are averaged over tasks, as draws; without an interval there is a single value.

    Unknown figures are omitted.
    """
    records = [placed.record for placed in finished]
    single = {
        "nodes": _mean_nodes(records),
        "first_token_ms": _first_token_ms(records),
        **_tau_by_trajectories(records, trajectories),
    }
    found = {name: np.array([value]) for name, value in single.items() if value is not None}
    return {**_compute_rates(task, finished, plain), **found}


def _to_fields(figures: Mapping[Figure, Array]) -> dict[str, Any]:
    """Convert draws to fields of a cell."""
    return {
        **{name: interval(figures[name]) for name in INTERVALS if name in figures},
        **{name: float(figures[name][0]) for name in ("nodes", "first_token_ms") if name in figures},
        "by_trajectories": {name: float(draws[0]) for name, draws in figures.items() if isinstance(name, int)},
    }


def _compute_rates(
    task: str, finished: Sequence[PlacedRecord], plain: Mapping[Hashable, RequestRecord]
) -> dict[Figure, Array]:
    """Compute the figures with intervals, as draws."""
    pairs = [(placed, plain[placed.pair]) for placed in finished if placed.pair in plain]
    speeds = group_timings((placed.timing_cluster, decode_row(placed.record)) for placed in finished)
    passes = cluster_table(
        (placed.cluster, tau_row(placed.record)) for placed in finished if count(placed.record, "cycles")
    )
    decoding = group_timings((own.timing_cluster, decode_row(own.record) + decode_row(base)) for own, base in pairs)
    whole = group_timings((own.timing_cluster, whole_row(own.record) + whole_row(base)) for own, base in pairs)
    found = {
        "tokens_per_second": None if speeds is None else ratio_of_sums(speeds, task),
        "speedup": None if decoding is None else paired_speedup(decoding, task),
        "whole_speedup": None if whole is None else paired_speedup(whole, task),
        "tau": None if passes is None else ratio_of_sums(passes, task),
    }
    return {name: draws for name, draws in found.items() if draws is not None and math.isfinite(draws[0])}


def decode_row(record: RequestRecord) -> tuple[float, float]:
    return record.decode_tokens, record.decode_seconds


def whole_row(record: RequestRecord) -> tuple[float, float]:
    return record.output_tokens, record.total_seconds


def tau_row(record: RequestRecord) -> tuple[float, float]:
    return record.output_tokens, count(record, "cycles")


def count(record: RequestRecord, name: str) -> int:
    """Get a count from the engine's statistics; 0 if a peer does not report it."""
    return (record.stats or {}).get(name) or 0


def _mean_nodes(records: Sequence[RequestRecord]) -> float | None:
    reported = [record for record in records if "drafted_nodes" in (record.stats or {})]
    cycles = sum(count(record, "cycles") for record in reported)
    return (sum(count(record, "drafted_nodes") for record in reported) + cycles) / cycles if cycles else None


def _first_token_ms(records: Sequence[RequestRecord]) -> float | None:
    seconds = [record.first_token_seconds for record in records if record.first_token_seconds is not None]
    return 1000.0 * median(seconds) if seconds else None


def _tau_by_trajectories(records: Sequence[RequestRecord], counts: Sequence[int]) -> dict[Figure, float]:
    """Compute tau over the first n samples of each prompt, for every requested n."""
    curve: dict[Figure, float] = {}
    for samples in sorted(counts) if max(counts, default=1) > 1 else []:
        rows = [tau_row(record) for record in records if record.sample < samples and count(record, "cycles")]
        if rows:
            curve[samples] = sum(tokens for tokens, _ in rows) / sum(cycles for _, cycles in rows)
    return curve


# --- counts -----------------------------------------------------------------------------------------------------------


def _count_fields(everything: Sequence[RequestRecord], batch: int) -> dict[str, Any]:
    """Compute the fields of a cell that are counts or ratios of counts."""
    records = [record for record in everything if record.error is None]
    by_source = _compute_shares(_sum_counts(records, "accepted_by_source"), _sum_counts(records, "tried_by_source"))
    routes = _sum_counts(records, "routes")
    return {
        "prompts": len({(record.task, record.prompt) for record in records}),
        "requests": len(records),
        "errors": len(everything) - len(records),
        "output_tokens": sum(record.output_tokens for record in records),
        "p_s": by_source.get(SPINE_SOURCE),
        "p_t": by_source.get(BRANCH_SOURCE),
        "by_depth": _acceptance_by_depth(records),
        "by_source": by_source,
        **_calibration(records),
        "routes": _compute_shares(routes, {name: routes.total() for name in routes}),
        "cycle_ms": _cycle_ms(records, batch),
        "peak_bytes": max((r.peak_bytes for r in records if r.peak_bytes is not None), default=None),
        "lossless": verdict_counts(records),
    }


def verdict_counts(records: Iterable[RequestRecord]) -> dict[str, int]:
    """Count requests by verdict, from harmless to wrong; unchecked requests are omitted."""
    found = Counter(record.lossless.verdict for record in records if record.lossless is not None)
    return {verdict: found[verdict] for verdict in VERDICTS if verdict in found}


def _sum_counts(records: Iterable[RequestRecord], name: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for record in records:
        total.update((record.stats or {}).get(name) or {})
    return total


def _compute_shares(parts: Mapping[str, int], wholes: Mapping[str, int]) -> dict[str, float]:
    return {name: parts.get(name, 0) / whole for name, whole in sorted(wholes.items()) if whole}


def _calibration(records: Sequence[RequestRecord]) -> dict[str, Any]:
    found = [known for record in records if (known := (record.stats or {}).get("calibration"))]
    bins = _add_reliabilities((row["from"], row) for own in found for row in own["bins"])
    sources = _add_reliabilities(item for own in found for item in own["sources"].items())
    num_tried = sum(tried for tried, _, _ in bins.values())
    error = sum(abs(expected - accepted) for _, expected, accepted in bins.values())
    return {
        "expected_by_source": {name: expected / tried for name, (tried, expected, _) in sorted(sources.items())},
        "calibration_error": error / num_tried if num_tried else None,
    }


def _add_reliabilities(rows: Iterable[tuple[Any, Mapping[str, float]]]) -> dict[Any, list[float]]:
    """By name: nodes that were tried, how many the drafter expected to be accepted, and how many were."""
    totals: dict[Any, list[float]] = {}
    for name, row in rows:
        counts = row["tried"], row["tried"] * row["expected"], row["tried"] * row["accepted"]
        totals[name] = [known + new for known, new in zip(totals.get(name, (0.0, 0.0, 0.0)), counts, strict=True)]
    return totals


def _acceptance_by_depth(records: Sequence[RequestRecord]) -> list[float]:
    reported = [record.stats for record in records if record.stats]
    tried, accepted = (
        [sum(column) for column in zip_longest(*(stats.get(name) or [] for stats in reported), fillvalue=0)]
        for name in ("tried_by_depth", "accepted_by_depth")
    )
    pairs = zip_longest(accepted, tried, fillvalue=0)
    return [found / trees for found, trees in pairs if trees]


def _cycle_ms(records: Iterable[RequestRecord], batch: int) -> dict[str, float]:
    """Compute milliseconds per cycle by stage. In a batch the remaining time cannot be assigned to a request."""
    reported = [
        (count(record, "cycles"), record.stats["seconds"])
        for record in records
        if record.stats and count(record, "cycles") and (record.stats.get("seconds") or {}).keys() >= _TIMED_PARTS
    ]
    if not reported:
        return {}
    total = {part: math.fsum(seconds[part] for _, seconds in reported) for part in _TIMED_PARTS}
    split = {part: total[part] for part in CYCLE_PARTS}
    if batch == 1:
        split["other"] = max(0.0, total["total"] - total["prefill"] - math.fsum(split.values()))
    cycles = sum(found for found, _ in reported)
    return {part: 1000.0 * seconds / cycles for part, seconds in split.items()}
