"""From records to figures: what every method did on every task, beside plain decoding of the same prompts.

Speeds and acceptance lengths are ratios of sums: all tokens over all seconds, all tokens over all passes. A speed-up
compares a method with plain decoding on the requests that both finished in the same run; runs may be pooled, their
times are never mixed within a pair.

The row over all tasks (``ALL_TASKS``) has the arithmetic mean of the tasks' figures for tokens/s, speed-ups, tau,
positions a pass, time to first token and tau by trajectories: every task that the method has figures for counts alike.
Counts are sums, and what is a share of counts (acceptance by depth and source, p_s, p_t, routes, the split of a cycle)
is taken from the counts of all tasks together.

Intervals come from bootstrap.py. A task with one prompt has an interval without width: ``low == high == value``.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import zip_longest
from statistics import fmean, median
from typing import Any, NamedTuple

from draftwood.bench.bootstrap import Array, cluster_table, interval, mean_of_strata, paired_speedup, ratio_of_sums
from draftwood.bench.methods import DRAFTER, PLAIN
from draftwood.bench.records import DIFFERENT, ERROR, IDENTICAL, TIE, Key, Manifest, RequestRecord, Run
from draftwood.bench.summary import ALL_TASKS, Cell, Summary
from draftwood.engine.stats import BRANCH_SOURCE, SPINE_SOURCE

# What two runs must agree in to be pooled, beside the machine.
POOLED_MODEL = ("name", "dtype", "backend", "device")
POOLED_SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "ignore_eos",
    "trajectories",
    "batch",
    "raw",
)
VERDICTS = (IDENTICAL, TIE, DIFFERENT, ERROR)  # from harmless to wrong
CYCLE_PARTS = ("draft", "verify", "accept")
MACHINE = "machine "  # how the facts about the machine begin in ``identity``
_TIMED = {*CYCLE_PARTS, "prefill", "total"}


class Placed(NamedTuple):
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


def summarise(runs: Sequence[Run]) -> list[Summary]:
    """One summary for the runs of one model, machine and way of sampling. The same run given twice counts once."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        group = groups.setdefault(json.dumps(sorted(identity(run.manifest).items()), default=str), [])
        if run not in group:
            group.append(run)
    titles = _titles([group[0].manifest for group in groups.values()])
    return [_summary(title, group) for title, group in zip(titles, groups.values(), strict=True)]


def latest(records: Iterable[RequestRecord]) -> dict[Key, RequestRecord]:
    """The records of one run by key. A request that was made again after an interruption counts as it came out last."""
    return {record.key: record for record in records}


def is_plain(method: Mapping[str, Any]) -> bool:
    """Whether a method of a manifest is plain decoding by this engine."""
    return bool(method.get("kind", DRAFTER) == DRAFTER and method.get("drafter") == PLAIN)


def definition(method: Mapping[str, Any]) -> str:
    """What a method is, whatever it is called. Plain decoding has no use for a memory or a budget."""
    parts = ("kind", "drafter") if is_plain(method) else ("kind", "drafter", "options", "memory", "budget")
    return json.dumps({part: method.get(part) for part in parts}, sort_keys=True, default=str)


def identity(manifest: Manifest) -> dict[str, str]:
    """What sets a run apart from those it must not be pooled with, by the words a title uses."""
    parts: dict[str, Any] = {f"model {name}": manifest.model.get(name) for name in POOLED_MODEL}
    parts |= {MACHINE + name: value for name, value in manifest.machine.items()}
    parts |= {name: manifest.settings.get(name) for name in POOLED_SETTINGS}
    return {name: json.dumps(value, sort_keys=True, default=str) for name, value in parts.items()}


# --- titles and methods -----------------------------------------------------------------------------------------------


def _titles(manifests: Sequence[Manifest]) -> list[str]:
    """A short title each; where two would be the same, followed by what they differ in."""
    short = [_title(manifest) for manifest in manifests]
    titles = []
    for title, manifest in zip(short, manifests, strict=True):
        namesakes = [identity(other) for other, same in zip(manifests, short, strict=True) if same == title]
        apart = [
            f", {name} {json.loads(value)}"
            for name, value in identity(manifest).items()
            if any(other.get(name) != value for other in namesakes)
        ]
        titles.append(title + "".join(apart))
    return titles


def _title(manifest: Manifest) -> str:
    parts = [manifest.model.get("name"), manifest.model.get("dtype"), _place(manifest)]
    temperature = manifest.settings.get("temperature")
    named = [str(part) for part in parts if part]
    return ", ".join(named + ([] if temperature is None else [f"temperature {temperature:g}"]))


def _place(manifest: Manifest) -> str:
    """The processor, or the GPU that the model was on: the one of its number, as in cuda:1."""
    device = str(manifest.model.get("device") or "cpu")
    if device == "cpu":
        return str(manifest.machine.get("processor") or device)
    gpus = list(manifest.machine.get("gpus") or ())
    index = device.partition(":")[2]
    number = int(index) if index.isdigit() else 0
    return str(gpus[number]) if number < len(gpus) else device


def _united(manifests: Sequence[Manifest]) -> dict[str, Any]:
    """The first manifest with what the others add: tasks, failures, absent peers, papers' figures, commands."""
    united = asdict(manifests[0])
    for name in ("tasks", "failed", "absent"):
        united[name] = {key: value for manifest in manifests for key, value in getattr(manifest, name).items()}
    figures = [figure for manifest in manifests for figure in manifest.paper]
    united["paper"] = [figure for at, figure in enumerate(figures) if figure not in figures[:at]]
    united["command"] = "\n".join(dict.fromkeys(manifest.command for manifest in manifests))
    return united


def _methods_of(run: Run) -> list[dict[str, Any]]:
    """The methods of a run, with those that have records and are missing in its manifest."""
    known = [method["label"] for method in run.manifest.methods]
    unknown = sorted({record.method for record in run.records} - set(known))
    return [*run.manifest.methods, *({"label": label, "kind": DRAFTER, "drafter": label} for label in unknown)]


def _merged_methods(runs: Sequence[Run]) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """All methods in the order of their first appearance, and for every run the merged label of each of its own.

    A label that stands for something else in a later run is followed by that run's name there.
    """
    methods: dict[str, dict[str, Any]] = {}  # by merged label
    known: dict[tuple[str, str], str] = {}  # merged labels by label and definition
    labels: list[dict[str, str]] = []
    for run in runs:
        labels.append({})
        for method in _methods_of(run):
            own = str(method["label"])
            meaning = (own, definition(method))
            if meaning not in known:
                suffix = f" ({run.name})" if own in methods else ""
                while own + suffix in methods:  # runs in two places can have one name
                    suffix += "'"
                known[meaning] = own + suffix
                family = str(method.get("family", own.split(" @", 1)[0]))
                methods[own + suffix] = {**method, "label": own + suffix, "family": family + suffix}
            labels[-1][own] = known[meaning]
    return list(methods.values()), labels


# --- cells ------------------------------------------------------------------------------------------------------------


def _summary(title: str, runs: Sequence[Run]) -> Summary:
    methods, labels = _merged_methods(runs)
    tasks = list(dict.fromkeys(task for run in runs for task in run.manifest.tasks))
    by_cell: dict[tuple[str, str], list[Placed]] = {}
    plain: dict[Hashable, RequestRecord] = {}
    for number, run in enumerate(runs):
        baseline = next((method["label"] for method in _methods_of(run) if is_plain(method)), None)
        for record in latest(run.records).values():
            placed = Placed(number, record)
            by_cell.setdefault((labels[number][record.method], record.task), []).append(placed)
            if record.method == baseline and record.error is None:
                plain[placed.pair] = record
    tasks += sorted({task for _, task in by_cell} - set(tasks))
    cells: dict[tuple[str, str], Cell] = {}
    settings = runs[0].manifest.settings
    for label in (method["label"] for method in methods):
        cells |= _cells_of(label, {task: by_cell.get((label, task), []) for task in tasks}, plain, settings)
    return Summary(
        title=title,
        manifest=_united([run.manifest for run in runs]),
        runs=[run.name for run in runs],
        baseline=next((method["label"] for method in methods if is_plain(method)), None),
        methods=methods,
        tasks=tasks,
        cells=cells,
    )


def _cells_of(
    label: str,
    by_task: Mapping[str, list[Placed]],
    plain: Mapping[Hashable, RequestRecord],
    settings: Mapping[str, Any],
) -> dict[tuple[str, str], Cell]:
    """A cell for every task, with or without records, and the one over all of them."""
    batch = int(settings.get("batch", 1))
    cells: dict[tuple[str, str], Cell] = {}
    draws: dict[str, list[Array]] = {}
    for task, everything in by_task.items():
        finished = [placed for placed in everything if placed.record.error is None]
        rates = _rates(task, finished, plain)
        for name, figure in rates.items():
            draws.setdefault(name, []).append(figure)
        records = [placed.record for placed in finished]
        cells[label, task] = Cell(
            method=label,
            task=task,
            nodes=_nodes(records),
            first_token_ms=_first_token_ms(records),
            by_trajectories=_by_trajectories(records, settings.get("trajectories", ())),
            **_intervals(rates),
            **_counted([placed.record for placed in everything], batch),
        )
    own = list(cells.values())
    curves = [cell.by_trajectories for cell in own]
    cells[label, ALL_TASKS] = Cell(
        method=label,
        task=ALL_TASKS,
        nodes=_mean(cell.nodes for cell in own),
        first_token_ms=_mean(cell.first_token_ms for cell in own),
        by_trajectories={
            samples: fmean(curve[samples] for curve in curves if samples in curve)
            for samples in sorted({samples for curve in curves for samples in curve})
        },
        **_intervals({name: mean_of_strata(figures) for name, figures in draws.items()}),
        **_counted([placed.record for everything in by_task.values() for placed in everything], batch),
    )
    return cells


def _rates(task: str, finished: Sequence[Placed], plain: Mapping[Hashable, RequestRecord]) -> dict[str, Array]:
    """Draws of the figures that have intervals; those that cannot be known are left out."""
    pairs = [(placed, plain[placed.pair]) for placed in finished if placed.pair in plain]
    speeds = cluster_table((placed.cluster, decode_row(placed.record)) for placed in finished)
    passes = cluster_table(
        (placed.cluster, tau_row(placed.record)) for placed in finished if count(placed.record, "cycles")
    )
    decoding = cluster_table((own.cluster, decode_row(own.record) + decode_row(base)) for own, base in pairs)
    whole = cluster_table((own.cluster, whole_row(own.record) + whole_row(base)) for own, base in pairs)
    found = {
        "tokens_per_second": None if speeds is None else ratio_of_sums(speeds, task),
        "speedup": None if decoding is None else paired_speedup(decoding, task),
        "whole_speedup": None if whole is None else paired_speedup(whole, task),
        "tau": None if passes is None else ratio_of_sums(passes, task),
    }
    return {name: draws for name, draws in found.items() if draws is not None and math.isfinite(draws[0])}


def _intervals(draws: Mapping[str, Array]) -> dict[str, Any]:
    return {name: interval(figure) for name, figure in draws.items()}


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


def _by_trajectories(records: Sequence[RequestRecord], counts: Sequence[int]) -> dict[int, float]:
    """Tau over the first samples of each prompt, for every number of them that was asked for."""
    curve: dict[int, float] = {}
    for samples in sorted(counts) if max(counts, default=1) > 1 else []:
        rows = [tau_row(record) for record in records if record.sample < samples and count(record, "cycles")]
        if rows:
            curve[samples] = sum(tokens for tokens, _ in rows) / sum(cycles for _, cycles in rows)
    return curve


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


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
