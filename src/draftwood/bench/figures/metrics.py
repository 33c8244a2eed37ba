"""From records to figures: what every method did on every task, beside plain decoding of the same prompts.

Speeds and acceptance lengths are ratios of sums: all tokens over all seconds, all tokens over all passes. A speed-up
compares a method with plain decoding on the requests that both finished in the same run; runs may be pooled, their
times are never mixed within a pair.

The row over all tasks (``ALL_TASKS``) has the arithmetic mean of the tasks' figures for tokens/s, speed-ups, tau,
positions a pass, time to first token and tau by trajectories: every task counts alike, and where a method lacks one
that others have, there is no mean.
Counts are sums, and what is a share of counts (acceptance by depth and source, p_s, p_t, routes, the split of a cycle)
is taken from the counts of all tasks together.

Intervals come from bootstrap.py. A task with one prompt has an interval without width: ``low == high == value``.
"""

from __future__ import annotations

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
_TIMED = {*CYCLE_PARTS, "prefill", "total"}
Figure = str | int  # a field of Cell; a number: tau over that many trajectories


class PlacedRecord(NamedTuple):
    """A record and the number of its run: names of runs need not be unique."""

    run: int
    record: RequestRecord

    @property
    def pair(self) -> Hashable:
        """Equal for the same request of two methods."""
        return (self.run, *self.record.key[1:])

    @property
    def cluster(self) -> Hashable:
        """What is drawn as one: answers to one prompt are alike, in another round and in another run too."""
        return self.record.prompt

    @property
    def timed(self) -> Hashable:
        """The same for times: prompts that ran together have one."""
        return self.record.batch or self.record.prompt


def summarize(runs: Sequence[BenchRun]) -> list[Summary]:
    """One summary for the runs that belong together."""
    groups = group_runs(runs)
    names = make_titles([group[0].manifest for group in groups])
    return [_summary(name, group) for name, group in zip(names, groups, strict=True)]


def latest_records(records: Iterable[RequestRecord]) -> dict[RequestKey, RequestRecord]:
    """The records of one run by key. A request that was made again after an interruption counts as it came out last."""
    return {record.key: record for record in records}


# --- cells ------------------------------------------------------------------------------------------------------------


def _summary(title: str, runs: Sequence[BenchRun]) -> Summary:
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
        cells=_cells([method["label"] for method in methods], tasks, by_cell, plain, runs[0].manifest.settings),
    )


def _cells(
    labels: Sequence[str],
    tasks: Sequence[str],
    by_cell: Mapping[tuple[str, str], list[PlacedRecord]],
    plain: Mapping[Hashable, RequestRecord],
    settings: Mapping[str, Any],
) -> dict[tuple[str, str], Cell]:
    """A cell for every method and task, with or without records, and one over all tasks."""
    batch, trajectories = int(settings.get("batch", 1)), settings.get("trajectories", ())
    figures = {
        (label, task): _figures(task, _finished(by_cell.get((label, task), ())), plain, trajectories)
        for label in labels
        for task in tasks
    }
    told: dict[Figure, list[str]] = {}  # the tasks that any method has this figure of
    for name in dict.fromkeys(name for found in figures.values() for name in found):
        told[name] = [task for task in tasks if any(name in figures[label, task] for label in labels)]
    cells: dict[tuple[str, str], Cell] = {}
    for label in labels:
        everything = {task: [placed.record for placed in by_cell.get((label, task), ())] for task in tasks}
        means = {
            name: mean_of_strata([figures[label, task][name] for task in places])
            for name, places in told.items()
            if all(name in figures[label, task] for task in places)  # a mean over fewer would be compared with others
        }
        for task, found in everything.items():
            cells[label, task] = Cell(method=label, task=task, **_shown(figures[label, task]), **_counted(found, batch))
        pooled_records = [record for found in everything.values() for record in found]
        cells[label, ALL_TASKS] = Cell(method=label, task=ALL_TASKS, **_shown(means), **_counted(pooled_records, batch))
    return cells


def _finished(everything: Sequence[PlacedRecord]) -> list[PlacedRecord]:
    return [placed for placed in everything if placed.record.error is None]


# --- figures ----------------------------------------------------------------------------------------------------------


def _figures(
    task: str, finished: Sequence[PlacedRecord], plain: Mapping[Hashable, RequestRecord], trajectories: Sequence[int]
) -> dict[Figure, Array]:
    """What the mean over tasks is taken of, as draws; those without an interval have the figure itself and no others.

    What cannot be known is left out.
    """
    records = [placed.record for placed in finished]
    single = {
        "nodes": _nodes(records),
        "first_token_ms": _first_token_ms(records),
        **_by_trajectories(records, trajectories),
    }
    found = {name: np.array([value]) for name, value in single.items() if value is not None}
    return {**_rates(task, finished, plain), **found}


def _shown(figures: Mapping[Figure, Array]) -> dict[str, Any]:
    """The fields of a cell that these figures are."""
    return {
        **{name: interval(figures[name]) for name in INTERVALS if name in figures},
        **{name: float(figures[name][0]) for name in ("nodes", "first_token_ms") if name in figures},
        "by_trajectories": {name: float(draws[0]) for name, draws in figures.items() if isinstance(name, int)},
    }


def _rates(task: str, finished: Sequence[PlacedRecord], plain: Mapping[Hashable, RequestRecord]) -> dict[Figure, Array]:
    """Draws of the figures that have intervals."""
    pairs = [(placed, plain[placed.pair]) for placed in finished if placed.pair in plain]
    speeds = cluster_table((placed.timed, decode_row(placed.record)) for placed in finished)
    passes = cluster_table(
        (placed.cluster, tau_row(placed.record)) for placed in finished if count(placed.record, "cycles")
    )
    decoding = cluster_table((own.timed, decode_row(own.record) + decode_row(base)) for own, base in pairs)
    whole = cluster_table((own.timed, whole_row(own.record) + whole_row(base)) for own, base in pairs)
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
    """A count of the engine's statistics; 0 where a peer does not tell."""
    return (record.stats or {}).get(name) or 0


def _nodes(records: Sequence[RequestRecord]) -> float | None:
    told = [record for record in records if "drafted_nodes" in (record.stats or {})]
    cycles = sum(count(record, "cycles") for record in told)
    return (sum(count(record, "drafted_nodes") for record in told) + cycles) / cycles if cycles else None


def _first_token_ms(records: Sequence[RequestRecord]) -> float | None:
    seconds = [record.first_token_seconds for record in records if record.first_token_seconds is not None]
    return 1000.0 * median(seconds) if seconds else None


def _by_trajectories(records: Sequence[RequestRecord], counts: Sequence[int]) -> dict[Figure, float]:
    """Tau over the first samples of each prompt, for every number of them that was asked for."""
    curve: dict[Figure, float] = {}
    for samples in sorted(counts) if max(counts, default=1) > 1 else []:
        rows = [tau_row(record) for record in records if record.sample < samples and count(record, "cycles")]
        if rows:
            curve[samples] = sum(tokens for tokens, _ in rows) / sum(cycles for _, cycles in rows)
    return curve


# --- counts -----------------------------------------------------------------------------------------------------------


def _counted(everything: Sequence[RequestRecord], batch: int) -> dict[str, Any]:
    """The fields of a cell that are counts, or shares of counts."""
    records = [record for record in everything if record.error is None]
    by_source = _shares(_summed(records, "accepted_by_source"), _summed(records, "tried_by_source"))
    routes = _summed(records, "routes")
    return {
        "prompts": len({(record.task, record.prompt) for record in records}),
        "requests": len(records),
        "errors": len(everything) - len(records),
        "output_tokens": sum(record.output_tokens for record in records),
        "p_s": by_source.get(SPINE_SOURCE),
        "p_t": by_source.get(BRANCH_SOURCE),
        "by_depth": _by_depth(records),
        "by_source": by_source,
        "routes": _shares(routes, {name: routes.total() for name in routes}),
        "cycle_ms": _cycle_ms(records, batch),
        "peak_bytes": max((r.peak_bytes for r in records if r.peak_bytes is not None), default=None),
        "lossless": verdict_counts(records),
    }


def verdict_counts(records: Iterable[RequestRecord]) -> dict[str, int]:
    """Requests by verdict, from harmless to wrong; those that were not checked are left out."""
    found = Counter(record.lossless.verdict for record in records if record.lossless is not None)
    return {verdict: found[verdict] for verdict in VERDICTS if verdict in found}


def _summed(records: Iterable[RequestRecord], name: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for record in records:
        total.update((record.stats or {}).get(name) or {})
    return total


def _shares(parts: Mapping[str, int], wholes: Mapping[str, int]) -> dict[str, float]:
    return {name: parts.get(name, 0) / whole for name, whole in sorted(wholes.items()) if whole}


def _by_depth(records: Sequence[RequestRecord]) -> list[float]:
    told = [record.stats for record in records if record.stats]
    tried, accepted = (
        [sum(column) for column in zip_longest(*(stats.get(name) or [] for stats in told), fillvalue=0)]
        for name in ("tried_by_depth", "accepted_by_depth")
    )
    pairs = zip_longest(accepted, tried, fillvalue=0)
    return [found / trees for found, trees in pairs if trees]


def _cycle_ms(records: Iterable[RequestRecord], batch: int) -> dict[str, float]:
    """Milliseconds a cycle. In a batch the requests share their time, and what is left of it belongs to nobody."""
    told = [
        (count(record, "cycles"), record.stats["seconds"])
        for record in records
        if record.stats and count(record, "cycles") and (record.stats.get("seconds") or {}).keys() >= _TIMED
    ]
    if not told:
        return {}
    total = {part: math.fsum(seconds[part] for _, seconds in told) for part in _TIMED}
    split = {part: total[part] for part in CYCLE_PARTS}
    if batch == 1:
        split["other"] = max(0.0, total["total"] - total["prefill"] - math.fsum(split.values()))
    cycles = sum(found for found, _ in told)
    return {part: 1000.0 * seconds / cycles for part, seconds in split.items()}
