"""Compares two runs: what got faster or slower, and whether the change is significant.

Only requests that both runs finished are compared: same task, prompt, turn, sample and repeat. The ratio of after to
before is bootstrapped over prompts, and for times also over repeats and turns. A change is significant if its 99%
interval excludes 1, it is larger than ``FLOOR``, and there are at least ``MIN_PROMPTS`` prompts: with fewer, all lie on
one side of 1 too often by chance.
The level is 99% because many figures are tested at once and intervals of few prompts are too narrow. In simulated runs
without a real change, one figure in ten is still significant with 5 prompts, one in 20 with 10, one in 70 with 20.

The bootstrap cannot see a change of the machine's speed, which affects every prompt. Plain decoding in the same run is
affected too, so the speed-up over it is the reliable figure. It comes first; absolute figures cannot be compared if the
machine, or the speed of plain decoding, changed. No time can be compared if other processes used the machine.

Methods with the same label are compared, or pairs of methods (pairs.py), which are *before* and *after* then.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from draftwood.bench.figures.bootstrap import (
    Array,
    interval,
    mean_of_strata,
    quotient,
    resample_medians,
    resample_rows,
    resample_timed_rows,
)
from draftwood.bench.figures.metrics import VERDICTS, count, decode_row, latest_records, tau_row, verdict_counts
from draftwood.bench.figures.pairs import MethodPair, relabel_pairs
from draftwood.bench.figures.pooling import MACHINE, is_plain, method_definition, run_identity
from draftwood.bench.figures.summary import ALL_TASKS, MAX_OTHER_LOAD, Interval, is_above_tau
from draftwood.bench.records import ERROR, IDENTICAL, BenchRun, RequestRecord

CONFIDENCE = 0.99
FLOOR = 0.01
MIN_PROMPTS = 5

SPEEDUP, SPEED, TAU, FIRST_TOKEN = "speedup", "tokens_per_second", "tau", "first_token_ms"
METRICS = (SPEEDUP, SPEED, TAU, FIRST_TOKEN)
LOSSLESS, FAILED, SETTINGS, PRESENT = "lossless", "failed", "settings", "present"
FASTER, SLOWER, HIGHER, LOWER, WORSE, OTHER = "faster", "slower", "higher", "lower", "worse", "different"
SAME, UNKNOWN = "same within noise", "cannot be compared"
ALL_METHODS = "*"

_WORDS = {  # for a ratio above 1 and below 1
    SPEEDUP: (FASTER, SLOWER),
    SPEED: (FASTER, SLOWER),
    TAU: (HIGHER, LOWER),
    FIRST_TOKEN: (SLOWER, FASTER),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One figure of one method on one task in both runs; ``ALL_TASKS`` is the mean over the common tasks."""

    method: str  # ALL_METHODS: a whole task; for a pair of methods both labels, as in pld -> goose
    task: str
    metric: str  # one of METRICS, or: lossless, failed, settings, present
    before: float | None  # for lossless and failed: numbers of requests
    after: float | None
    ratio: Interval | None  # after over before, with its 99% interval
    verdict: str
    note: str = ""


class RecordPair(NamedTuple):
    """The same request of one method in both runs."""

    before: RequestRecord
    after: RequestRecord

    @property
    def timing_cluster(self) -> str:
        """The cluster for timings: a prompt, or a batch of prompts."""
        return self.before.batch or self.after.batch or self.before.prompt


class PairedDraws(NamedTuple):
    """A figure in both runs, as draws over the same prompts."""

    before: Array
    after: Array
    prompts: int


class RequestId(NamedTuple):
    """A request key without the method."""

    task: str
    prompt: str
    turn: int
    sample: int
    repeat: int


Records = Mapping[RequestId, RequestRecord]
Pairs = Mapping[RequestId, RecordPair]


def diff_runs(before: BenchRun, after: BenchRun, versus: Sequence[MethodPair] = ()) -> list[Change]:
    """List regressions, then every figure of both runs, speed-ups first, then what only one run has.

    With ``versus`` only these pairs of methods are compared; speed-ups are still relative to plain decoding.
    """
    if versus:
        asked = {ALL_METHODS, *(methods.label for methods in versus)}
        return [change for change in diff_runs(*relabel_pairs(before, after, versus)) if change.method in asked]
    old, new = _index_records(before), _index_records(after)
    pairs = {label: _pair_records(old[label], new[label]) for label in old if label in new}
    plain = _baseline(before, after, pairs)
    worse = [change for label, shared in pairs.items() for change in _find_wrong_outputs(label, shared)]
    figures: list[Change] = []
    for label, shared in pairs.items():
        figures += _compare_method(label, shared, None if plain is None else pairs[plain], label == plain)
    figures.sort(key=lambda change: METRICS.index(change.metric))
    return [
        *worse,
        *_find_failures(before, after),
        *_compare_settings(before, after),
        *_add_notes(figures, before, after, plain),
        *_find_unmatched(old, new),
    ]


# --- pairs ------------------------------------------------------------------------------------------------------------


def _index_records(run: BenchRun) -> dict[str, Records]:
    """Successful records by method, in the order of the manifest, then by request."""
    found: dict[str, dict[RequestId, RequestRecord]] = {str(method["label"]): {} for method in run.manifest.methods}
    for key, record in latest_records(run.records).items():
        if record.error is None:
            found.setdefault(key.method, {})[RequestId(*key[1:])] = record
    return {label: records for label, records in found.items() if records}


def _pair_records(old: Records, new: Records) -> Pairs:
    return {request: RecordPair(record, new[request]) for request, record in old.items() if request in new}


def _baseline(before: BenchRun, after: BenchRun, pairs: Mapping[str, Pairs]) -> str | None:
    """Return the label of plain decoding if both runs have it."""
    both = [{str(m["label"]) for m in run.manifest.methods if is_plain(m)} for run in (before, after)]
    return next((label for label in pairs if label in both[0] & both[1]), None)


# --- figures ----------------------------------------------------------------------------------------------------------


def _compare_method(label: str, shared: Pairs, plain: Pairs | None, is_baseline: bool) -> list[Change]:
    """Compare every metric of one method: the mean over tasks, if there are several, and each task."""
    tasks = list(dict.fromkeys(pair.before.task for pair in shared.values()))
    changes = []
    for metric in METRICS:
        if metric == SPEEDUP and (plain is None or is_baseline):
            continue  # the baseline's own speed-up is 1
        by_task: dict[str, PairedDraws] = {}
        for task in tasks:
            own = {request: pair for request, pair in shared.items() if pair.before.task == task}
            found = _compare_metric(metric, task, own, plain or {})
            if found is not None and np.isfinite([found.before[0], found.after[0]]).all():
                by_task[task] = found
        if len(by_task) > 1:
            changes.append(_judge_change(label, ALL_TASKS, metric, _average(list(by_task.values()))))
        changes += [_judge_change(label, task, metric, found) for task, found in by_task.items()]
    return changes


def _compare_metric(metric: str, task: str, shared: Pairs, plain: Pairs) -> PairedDraws | None:
    if metric == SPEEDUP:
        both = [(pair, plain[request]) for request, pair in shared.items() if request in plain]
        rows = [(own.timing_cluster, _join_rows(own, decode_row) + _join_rows(base, decode_row)) for own, base in both]
    elif metric == SPEED:
        rows = [(pair.timing_cluster, _join_rows(pair, decode_row)) for pair in shared.values()]
    elif metric == TAU:
        common = [pair for pair in shared.values() if all(count(record, "cycles") for record in pair)]
        rows = [(pair.before.prompt, _join_rows(pair, tau_row)) for pair in common]
    else:
        return _compare_first_tokens(task, shared.values())
    if not rows:
        return None
    sums = (resample_rows if metric == TAU else resample_timed_rows)(rows, task)
    rates = [quotient(sums[:, i], sums[:, i + 1]) for i in range(0, sums.shape[1], 2)]
    if metric == SPEEDUP:
        rates = [quotient(rates[0], rates[2]), quotient(rates[1], rates[3])]
    return PairedDraws(rates[0], rates[1], len({cluster for cluster, _ in rows}))


def _join_rows(pair: RecordPair, row: Callable[[RequestRecord], tuple[float, float]]) -> tuple[float, ...]:
    return row(pair.before) + row(pair.after)


def _compare_first_tokens(task: str, shared: Iterable[RecordPair]) -> PairedDraws | None:
    """Compare the median over prompts of each prompt's median request."""
    by_prompt: dict[str, list[tuple[float, float]]] = {}
    for pair in shared:
        old, new = pair
        if old.first_token_seconds is not None and new.first_token_seconds is not None:
            times = (1000.0 * old.first_token_seconds, 1000.0 * new.first_token_seconds)
            by_prompt.setdefault(pair.timing_cluster, []).append(times)
    if not by_prompt:
        return None
    table = np.array([[median(column) for column in zip(*times, strict=True)] for times in by_prompt.values()])
    medians = resample_medians(table, task)
    return PairedDraws(medians[:, 0], medians[:, 1], len(table))


def _average(found: Sequence[PairedDraws]) -> PairedDraws:
    return PairedDraws(
        mean_of_strata([one.before for one in found]),
        mean_of_strata([one.after for one in found]),
        sum(one.prompts for one in found),
    )


def _judge_change(label: str, task: str, metric: str, found: PairedDraws) -> Change:
    ratio = interval(quotient(found.after, found.before), CONFIDENCE)
    few = found.prompts < MIN_PROMPTS
    return Change(
        method=label,
        task=task,
        metric=metric,
        before=float(found.before[0]),
        after=float(found.after[0]),
        ratio=ratio,
        verdict=UNKNOWN if few or ratio is None else judge(ratio, metric),
        note=f"too few prompts: {found.prompts} of {MIN_PROMPTS}" if few else "",
    )


def judge(ratio: Interval, metric: str) -> str:
    """Classify a ratio of after to before."""
    above, below = _WORDS[metric]
    if ratio.low > 1.0 and ratio.value > 1.0 + FLOOR:
        return above
    if ratio.high < 1.0 and ratio.value < 1.0 - FLOOR:
        return below
    return SAME


# --- notes and other changes -----------------------------------------------------------------------------------------


def _find_wrong_outputs(label: str, shared: Pairs) -> list[Change]:
    """Report outputs that were identical to plain decoding before and are not any more."""
    checked = [pair for pair in shared.values() if all(record.lossless is not None for record in pair)]
    old, new = verdict_counts(pair.before for pair in checked), verdict_counts(pair.after for pair in checked)
    if new.get(ERROR, 0) <= old.get(ERROR, 0) and new.get(IDENTICAL, 0) >= old.get(IDENTICAL, 0):
        return []
    words = [f"{name} {old.get(name, 0)} -> {new.get(name, 0)}" for name in VERDICTS if name in old or name in new]
    before, after = (len(checked) - found.get(IDENTICAL, 0) for found in (old, new))
    return [_make_change(label, ALL_TASKS, LOSSLESS, WORSE, ", ".join(words), before, after)]


def _find_failures(before: BenchRun, after: BenchRun) -> list[Change]:
    """Report methods with more failed requests, among the requests of both runs."""
    old, new = latest_records(before.records), latest_records(after.records)
    counts: dict[str, tuple[int, int]] = {}
    for key in old.keys() & new.keys():
        failed = counts.get(key.method, (0, 0))
        counts[key.method] = (failed[0] + (old[key].error is not None), failed[1] + (new[key].error is not None))
    return [
        _make_change(label, ALL_TASKS, FAILED, WORSE, "failed requests", *failed)
        for label, failed in sorted(counts.items())
        if failed[1] > failed[0]
    ]


def _compare_settings(before: BenchRun, after: BenchRun) -> list[Change]:
    """Report different settings. Differences of the machine are notes on the figures."""
    old, new = run_identity(before.manifest), run_identity(after.manifest)
    names = [name for name in old if not name.startswith(MACHINE) and old[name] != new.get(name)]
    words = ", ".join(f"{name} {json.loads(old[name])} -> {json.loads(new[name])}" for name in names)
    return [_make_change(ALL_METHODS, ALL_TASKS, SETTINGS, OTHER, words)] if words else []


def _add_notes(changes: Sequence[Change], before: BenchRun, after: BenchRun, plain: str | None) -> list[Change]:
    """Add notes on what makes a figure less certain than its interval."""
    notes = _Notes(before, after, changes, plain)
    return [notes.add_to(change) for change in changes]


class _Notes:
    def __init__(self, before: BenchRun, after: BenchRun, changes: Sequence[Change], plain: str | None) -> None:
        self.other_machine = before.manifest.machine != after.manifest.machine
        self.one_run = _start(before) == _start(after)  # both are methods of one run, on one machine
        self.plain = plain
        loads = [run.manifest.other_load or 0.0 for run in (before, after)]
        self.other_load = max(loads) if max(loads) > MAX_OTHER_LOAD else None
        self.above_tau = _find_above_tau(changes)
        self.plain_changes = {
            change.task: change.ratio.value
            for change in changes
            if change.method == plain and change.metric == SPEED and change.verdict in (FASTER, SLOWER) and change.ratio
        }
        old, new = ({str(m["label"]): method_definition(m) for m in run.manifest.methods} for run in (before, after))
        self.redefined = {label: _describe_redefinition(old[label], new[label]) for label in old.keys() & new.keys()}
        one, two = before.manifest.tasks, after.manifest.tasks
        self.other_prompts = {
            task for task in one.keys() & two.keys() if one[task].get("sha256") != two[task].get("sha256")
        }
        if self.other_prompts:
            self.other_prompts.add(ALL_TASKS)

    def add_to(self, change: Change) -> Change:
        """Times that another machine or other processes changed are not a difference between the runs."""
        doubts = list(self.list_doubts(change))
        notes = [note for note in (change.note, *doubts, *self.list_differences(change)) if note]
        return replace(change, note="; ".join(notes), verdict=UNKNOWN if doubts else change.verdict)

    def list_doubts(self, change: Change) -> Iterator[str]:
        if change.metric == SPEEDUP and change.task in self.above_tau.get(change.method, ()):
            yield "a speed-up above tau: timing is disturbed"
        if change.metric != TAU and self.other_load is not None:
            yield f"machine was loaded: other processes used {self.other_load:.0%} of the cores"
        if change.metric in (SPEED, FIRST_TOKEN):
            if self.other_machine:
                yield "machine may differ"
            elif change.method != self.plain and change.task in self.plain_changes:
                yield f"machine may differ: {self.plain} changed too, x{self.plain_changes[change.task]:.2f}"
            elif self.plain is None and not self.one_run:
                yield "machine may differ: no plain decoding to compare with"

    def list_differences(self, change: Change) -> Iterator[str]:
        if self.redefined.get(change.method):
            yield f"options of the method differ: {self.redefined[change.method]}"
        if change.task in self.other_prompts:
            yield "prompts differ: only common ids are compared"


def _find_above_tau(changes: Sequence[Change]) -> dict[str, set[str]]:
    """Tasks of each method where a run has a speed-up that drafting cannot explain."""
    taus = {(change.method, change.task): (change.before, change.after) for change in changes if change.metric == TAU}
    found: dict[str, set[str]] = {}
    for change in changes:
        pairs = zip((change.before, change.after), taus.get((change.method, change.task), ()), strict=False)
        if change.metric == SPEEDUP and any(is_above_tau(speedup, tau) for speedup, tau in pairs):
            found.setdefault(change.method, set()).add(change.task)
    return found


def _start(run: BenchRun) -> tuple[str, str]:
    return run.manifest.started, run.manifest.command


def _describe_redefinition(before: str, after: str) -> str:
    """Describe how a method's definition differs, for the parts that both runs record."""
    old, new = json.loads(before), json.loads(after)
    common = [part for part in old if old[part] is not None and new.get(part) is not None]
    return ", ".join(f"{part} {old[part]} -> {new[part]}" for part in common if old[part] != new[part])


def _find_unmatched(old: Mapping[str, Records], new: Mapping[str, Records]) -> list[Change]:
    """Report methods and tasks with results in one run only, and methods without a common request."""
    tasks = [_tasks(request for records in run.values() for request in records) for run in (old, new)]
    changes = [_make_change(ALL_METHODS, task, PRESENT, UNKNOWN, side) for task, side in _list_unmatched(*tasks)]
    changes += [
        _make_change(label, ALL_TASKS, PRESENT, UNKNOWN, side) for label, side in _list_unmatched(list(old), list(new))
    ]
    for label in (label for label in old if label in new):
        own = [[task for task in _tasks(run[label]) if task in tasks[0] and task in tasks[1]] for run in (old, new)]
        changes += [_make_change(label, task, PRESENT, UNKNOWN, side) for task, side in _list_unmatched(*own)]
        if not old[label].keys() & new[label].keys():
            changes.append(_make_change(label, ALL_TASKS, PRESENT, UNKNOWN, "no request in common"))
    return changes


def _list_unmatched(old: Sequence[str], new: Sequence[str]) -> list[tuple[str, str]]:
    """List the names that only one side has, and which side."""
    gone = [(name, "only in the first run") for name in old if name not in new]
    return gone + [(name, "only in the second run") for name in new if name not in old]


def _tasks(requests: Iterable[RequestId]) -> list[str]:
    return list(dict.fromkeys(request.task for request in requests))


def _make_change(
    method: str, task: str, metric: str, verdict: str, note: str, before: int | None = None, after: int | None = None
) -> Change:
    return Change(
        method=method, task=task, metric=metric, before=before, after=after, ratio=None, verdict=verdict, note=note
    )
