"""Two runs side by side: what got faster or slower, and whether that is more than noise.

Only requests that both runs finished are compared: the same task, prompt, turn, sample and repeat. The ratio of after
to before is bootstrapped over prompts. A change counts if its 99% interval leaves out 1, if it is larger than
``FLOOR``, and if there are at least ``MIN_PROMPTS`` prompts: with fewer, all lie on one side of 1 too often by chance.
99%, since many figures are looked at together and intervals of few prompts are too narrow: of simulated runs that
differ by chance alone one figure in ten still counts with 5 prompts, one in twenty with 10, one in seventy with 20.

Seconds differ with the mood of a machine, and the bootstrap cannot see that: a slow hour makes every prompt slow. Plain
decoding of the same run had the same hour, so the speed-up over it is the figure to trust. It comes first, and absolute
figures are marked where the machine, or plain decoding itself, was not the same.

Methods of one label are compared, or pairs of them (versus.py): there *before* and *after* are a pair's two methods.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np

from draftwood.bench.figures.bootstrap import (
    Array,
    cluster_table,
    interval,
    mean_of_strata,
    quotient,
    resample_medians,
    resample_sums,
)
from draftwood.bench.figures.metrics import VERDICTS, count, decode_row, latest_records, tau_row, verdict_counts
from draftwood.bench.figures.pairs import MethodPair, relabel_pairs
from draftwood.bench.figures.pooling import MACHINE, is_plain, method_definition, run_identity
from draftwood.bench.figures.summary import ALL_TASKS, Interval
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

_WORDS = {  # of a ratio above 1 and below it
    SPEEDUP: (FASTER, SLOWER),
    SPEED: (FASTER, SLOWER),
    TAU: (HIGHER, LOWER),
    FIRST_TOKEN: (SLOWER, FASTER),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """One figure of one method on one task in both runs; ``ALL_TASKS`` is the mean over the tasks both have."""

    method: str  # ALL_METHODS: a whole task; of two that are compared both labels, as in pld -> goose
    task: str
    metric: str  # one of METRICS, or what is no figure: lossless, failed, settings, present
    before: float | None  # lossless, failed: numbers of requests
    after: float | None
    ratio: Interval | None  # after over before, with its 99% interval
    verdict: str
    note: str = ""


class RecordPair(NamedTuple):
    """The same request of one method in both runs."""

    before: RequestRecord
    after: RequestRecord

    @property
    def timed(self) -> str:
        """What is drawn as one where times are compared: a prompt, or the prompts that ran together."""
        return self.before.batch or self.after.batch or self.before.prompt


class PairedDraws(NamedTuple):
    """A figure in both runs, as draws over the same prompts."""

    before: Array
    after: Array
    prompts: int


class RequestId(NamedTuple):
    """Which request of a method: a key without the method."""

    task: str
    prompt: str
    turn: int
    sample: int
    repeat: int


Records = Mapping[RequestId, RequestRecord]
Pairs = Mapping[RequestId, RecordPair]


def diff_runs(before: BenchRun, after: BenchRun, versus: Sequence[MethodPair] = ()) -> list[Change]:
    """What got worse, every figure that both runs have, speed-ups first, then what only one of them has.

    With ``versus`` these methods alone are compared; speed-ups are still over plain decoding.
    """
    if versus:
        asked = {ALL_METHODS, *(methods.label for methods in versus)}
        return [change for change in diff_runs(*relabel_pairs(before, after, versus)) if change.method in asked]
    old, new = _finished(before), _finished(after)
    pairs = {label: _paired(old[label], new[label]) for label in old if label in new}
    plain = _baseline(before, after, pairs)
    worse = [change for label, shared in pairs.items() for change in _worse(label, shared)]
    figures: list[Change] = []
    for label, shared in pairs.items():
        figures += _figures(label, shared, None if plain is None else pairs[plain], label == plain)
    figures.sort(key=lambda change: METRICS.index(change.metric))
    return [
        *worse,
        *_failing(before, after),
        *_settings(before, after),
        *_marked(figures, before, after, plain),
        *_one_sided(old, new),
    ]


# --- pairs ------------------------------------------------------------------------------------------------------------


def _finished(run: BenchRun) -> dict[str, Records]:
    """Records by method, in the order of the manifest, then by request; failed ones are left out."""
    found: dict[str, dict[RequestId, RequestRecord]] = {str(method["label"]): {} for method in run.manifest.methods}
    for key, record in latest_records(run.records).items():
        if record.error is None:
            found.setdefault(key.method, {})[RequestId(*key[1:])] = record
    return {label: records for label, records in found.items() if records}


def _paired(old: Records, new: Records) -> Pairs:
    return {request: RecordPair(record, new[request]) for request, record in old.items() if request in new}


def _baseline(before: BenchRun, after: BenchRun, pairs: Mapping[str, Pairs]) -> str | None:
    """The label of plain decoding, if both runs have it."""
    both = [{str(m["label"]) for m in run.manifest.methods if is_plain(m)} for run in (before, after)]
    return next((label for label in pairs if label in both[0] & both[1]), None)


# --- figures ----------------------------------------------------------------------------------------------------------


def _figures(label: str, shared: Pairs, plain: Pairs | None, is_baseline: bool) -> list[Change]:
    """The changes of one method: each metric over all tasks, if there are several, and on each."""
    tasks = list(dict.fromkeys(pair.before.task for pair in shared.values()))
    changes = []
    for metric in METRICS:
        if metric == SPEEDUP and (plain is None or is_baseline):
            continue  # over plain decoding itself it is 1
        by_task: dict[str, PairedDraws] = {}
        for task in tasks:
            own = {request: pair for request, pair in shared.items() if pair.before.task == task}
            found = _compared(metric, task, own, plain or {})
            if found is not None and np.isfinite([found.before[0], found.after[0]]).all():
                by_task[task] = found
        if len(by_task) > 1:
            changes.append(_change(label, ALL_TASKS, metric, _overall(list(by_task.values()))))
        changes += [_change(label, task, metric, found) for task, found in by_task.items()]
    return changes


def _compared(metric: str, task: str, shared: Pairs, plain: Pairs) -> PairedDraws | None:
    if metric == SPEEDUP:
        both = [(pair, plain[request]) for request, pair in shared.items() if request in plain]
        rows = [(own.timed, _rows(own, decode_row) + _rows(base, decode_row)) for own, base in both]
    elif metric == SPEED:
        rows = [(pair.timed, _rows(pair, decode_row)) for pair in shared.values()]
    elif metric == TAU:
        told = [pair for pair in shared.values() if all(count(record, "cycles") for record in pair)]
        rows = [(pair.before.prompt, _rows(pair, tau_row)) for pair in told]
    else:
        return _first_tokens(task, shared.values())
    table = cluster_table(rows)
    if table is None:
        return None
    sums = resample_sums(table, task)
    rates = [quotient(sums[:, i], sums[:, i + 1]) for i in range(0, table.shape[1], 2)]
    if metric == SPEEDUP:
        rates = [quotient(rates[0], rates[2]), quotient(rates[1], rates[3])]
    return PairedDraws(rates[0], rates[1], len(table))


def _rows(pair: RecordPair, row: Callable[[RequestRecord], tuple[float, float]]) -> tuple[float, ...]:
    return row(pair.before) + row(pair.after)


def _first_tokens(task: str, shared: Iterable[RecordPair]) -> PairedDraws | None:
    """Medians over prompts, of each prompt's median request."""
    by_prompt: dict[str, list[tuple[float, float]]] = {}
    for pair in shared:
        old, new = pair
        if old.first_token_seconds is not None and new.first_token_seconds is not None:
            times = (1000.0 * old.first_token_seconds, 1000.0 * new.first_token_seconds)
            by_prompt.setdefault(pair.timed, []).append(times)
    if not by_prompt:
        return None
    table = np.array([[median(column) for column in zip(*times, strict=True)] for times in by_prompt.values()])
    medians = resample_medians(table, task)
    return PairedDraws(medians[:, 0], medians[:, 1], len(table))


def _overall(found: Sequence[PairedDraws]) -> PairedDraws:
    return PairedDraws(
        mean_of_strata([one.before for one in found]),
        mean_of_strata([one.after for one in found]),
        sum(one.prompts for one in found),
    )


def _change(label: str, task: str, metric: str, found: PairedDraws) -> Change:
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
    """What a ratio of after to before means, if it is more than noise."""
    above, below = _WORDS[metric]
    if ratio.low > 1.0 and ratio.value > 1.0 + FLOOR:
        return above
    if ratio.high < 1.0 and ratio.value < 1.0 - FLOOR:
        return below
    return SAME


# --- what else is to be said ------------------------------------------------------------------------------------------


def _worse(label: str, shared: Pairs) -> list[Change]:
    """Outputs that were those of plain decoding and are not any more."""
    checked = [pair for pair in shared.values() if all(record.lossless is not None for record in pair)]
    old, new = verdict_counts(pair.before for pair in checked), verdict_counts(pair.after for pair in checked)
    if new.get(ERROR, 0) <= old.get(ERROR, 0) and new.get(IDENTICAL, 0) >= old.get(IDENTICAL, 0):
        return []
    words = [f"{name} {old.get(name, 0)} -> {new.get(name, 0)}" for name in VERDICTS if name in old or name in new]
    before, after = (len(checked) - found.get(IDENTICAL, 0) for found in (old, new))
    return [_told(label, ALL_TASKS, LOSSLESS, WORSE, ", ".join(words), before, after)]


def _failing(before: BenchRun, after: BenchRun) -> list[Change]:
    """Methods more of whose requests fail now, of those that both runs made."""
    old, new = latest_records(before.records), latest_records(after.records)
    counts: dict[str, tuple[int, int]] = {}
    for key in old.keys() & new.keys():
        failed = counts.get(key.method, (0, 0))
        counts[key.method] = (failed[0] + (old[key].error is not None), failed[1] + (new[key].error is not None))
    return [
        _told(label, ALL_TASKS, FAILED, WORSE, "requests that failed", *failed)
        for label, failed in sorted(counts.items())
        if failed[1] > failed[0]
    ]


def _settings(before: BenchRun, after: BenchRun) -> list[Change]:
    """Where the two runs did not measure the same thing; the machine is told elsewhere."""
    old, new = run_identity(before.manifest), run_identity(after.manifest)
    names = [name for name in old if not name.startswith(MACHINE) and old[name] != new.get(name)]
    words = ", ".join(f"{name} {json.loads(old[name])} -> {json.loads(new[name])}" for name in names)
    return [_told(ALL_METHODS, ALL_TASKS, SETTINGS, OTHER, words)] if words else []


def _marked(changes: Sequence[Change], before: BenchRun, after: BenchRun, plain: str | None) -> list[Change]:
    """Adds to every figure what makes it less certain than its interval says."""
    marks = _Marks(before, after, changes, plain)
    return [replace(change, note="; ".join(filter(None, (change.note, *marks.of(change))))) for change in changes]


class _Marks:
    def __init__(self, before: BenchRun, after: BenchRun, changes: Sequence[Change], plain: str | None) -> None:
        self.other_machine = before.manifest.machine != after.manifest.machine
        self.one_run = _start(before) == _start(after)  # where methods took turns, on one machine
        self.plain = plain
        self.moved = {
            change.task: change.ratio.value
            for change in changes
            if change.method == plain and change.metric == SPEED and change.verdict in (FASTER, SLOWER) and change.ratio
        }
        old, new = ({str(m["label"]): method_definition(m) for m in run.manifest.methods} for run in (before, after))
        self.redefined = {label: _redefined(old[label], new[label]) for label in old.keys() & new.keys()}
        one, two = before.manifest.tasks, after.manifest.tasks
        self.other_prompts = {
            task for task in one.keys() & two.keys() if one[task].get("sha256") != two[task].get("sha256")
        }
        if self.other_prompts:
            self.other_prompts.add(ALL_TASKS)

    def of(self, change: Change) -> Iterator[str]:
        if change.metric in (SPEED, FIRST_TOKEN):
            if self.other_machine:
                yield "machine may differ"
            elif change.method != self.plain and change.task in self.moved:
                yield f"machine may differ: {self.plain} moved too, x{self.moved[change.task]:.2f}"
            elif self.plain is None and not self.one_run:
                yield "machine may differ: no plain decoding to hold it against"
        if self.redefined.get(change.method):
            yield f"the method's options differ: {self.redefined[change.method]}"
        if change.task in self.other_prompts:
            yield "the prompts differ: only common ids compared"


def _start(run: BenchRun) -> tuple[str, str]:
    return run.manifest.started, run.manifest.command


def _redefined(before: str, after: str) -> str:
    """In what a method's definition differs, of what both runs tell."""
    old, new = json.loads(before), json.loads(after)
    told = [part for part in old if old[part] is not None and new.get(part) is not None]
    return ", ".join(f"{part} {old[part]} -> {new[part]}" for part in told if old[part] != new[part])


def _one_sided(old: Mapping[str, Records], new: Mapping[str, Records]) -> list[Change]:
    """Methods and tasks that only one run has finished requests of, and methods without a common request."""
    tasks = [_tasks(request for records in run.values() for request in records) for run in (old, new)]
    changes = [_told(ALL_METHODS, task, PRESENT, UNKNOWN, side) for task, side in _apart(*tasks)]
    changes += [_told(label, ALL_TASKS, PRESENT, UNKNOWN, side) for label, side in _apart(list(old), list(new))]
    for label in (label for label in old if label in new):
        own = [[task for task in _tasks(run[label]) if task in tasks[0] and task in tasks[1]] for run in (old, new)]
        changes += [_told(label, task, PRESENT, UNKNOWN, side) for task, side in _apart(*own)]
        if not old[label].keys() & new[label].keys():
            changes.append(_told(label, ALL_TASKS, PRESENT, UNKNOWN, "no request in common"))
    return changes


def _apart(old: Sequence[str], new: Sequence[str]) -> list[tuple[str, str]]:
    """The names that only one side has, and which."""
    gone = [(name, "only in the run before") for name in old if name not in new]
    return gone + [(name, "only in the run after") for name in new if name not in old]


def _tasks(requests: Iterable[RequestId]) -> list[str]:
    return list(dict.fromkeys(request.task for request in requests))


def _told(
    method: str, task: str, metric: str, verdict: str, note: str, before: int | None = None, after: int | None = None
) -> Change:
    return Change(
        method=method, task=task, metric=metric, before=before, after=after, ratio=None, verdict=verdict, note=note
    )
