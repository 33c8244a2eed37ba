"""The tables of a comparison of heads; missing figures are a dash."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftwood.bench.figures.bootstrap import cluster_table, interval, mean_of_strata, quotient, resample_sums
from draftwood.bench.figures.metrics import count, latest_records, summarize, tau_row
from draftwood.bench.figures.summary import ALL_TASKS, Cell, Interval
from draftwood.bench.records.run_folder import IDENTICAL, MANIFEST, RequestKey, RequestRecord, read_run
from draftwood.errors import OptionError
from draftwood.train.loop.logs import read_log

Records = Mapping[tuple[Any, ...], RequestRecord]  # of one growth policy: by task, prompt, turn, sample and repeat
NOTHING = "-"


class Entry(NamedTuple):
    """The result folders of a head."""

    name: str
    run: Path  # training run
    benches: dict[str, Path]  # by temperature
    ranks: Path


class Bench(NamedTuple):
    """A head at one temperature, by growth."""

    cells: dict[str, dict[str, Cell]]  # by growth, then task, with ALL_TASKS
    records: dict[str, Records]  # finished records with cycles


class Paired(NamedTuple):
    change: Interval  # of tokens per pass, in percent
    shared: int  # common requests
    most: int  # maximum requests of either


def read_bench(folder: Path) -> Bench:
    if not (folder / MANIFEST).is_file():
        return Bench({}, {})
    run = read_run(folder)
    growths = {m["label"]: m["options"]["growth"] for m in run.manifest.methods if "growth" in m["options"]}
    cells: dict[str, dict[str, Cell]] = {growth: {} for growth in growths.values()}
    records: dict[str, dict[tuple[Any, ...], RequestRecord]] = {growth: {} for growth in growths.values()}
    for (label, task), cell in summarize([run])[0].cells.items():
        if label in growths:
            cells[growths[label]][task] = cell
    for key, record in latest_records(run.records).items():
        if key.method in growths and record.error is None and count(record, "cycles"):
            records[growths[key.method]][_request(key)] = record
    return Bench(cells, dict(records))


def _request(key: RequestKey) -> tuple[Any, ...]:
    return key[1:]


def paired(ours: Records, theirs: Records) -> Paired | None:
    """Ratio of tokens per pass, averaged over tasks. Both heads are resampled together."""
    shared = [key for key in ours if key in theirs]
    strata = []
    for task in sorted({key[0] for key in shared}):
        own = [key for key in shared if key[0] == task]
        table = cluster_table((key[1], tau_row(ours[key]) + tau_row(theirs[key])) for key in own)
        assert table is not None
        sums = resample_sums(table, task)  # [1 + R, 4]
        strata.append((quotient(sums[:, 0], sums[:, 1]), quotient(sums[:, 2], sums[:, 3])))
    if not strata:
        return None
    above, below = (mean_of_strata([pair[which] for pair in strata]) for which in (0, 1))
    change = interval(100.0 * (quotient(above, below) - np.ones_like(above)))
    return None if change is None else Paired(change, len(shared), max(len(ours), len(theirs)))


def tables(
    entries: Sequence[Entry], pairs: Sequence[tuple[str, str]], growths: Sequence[str], tasks: Sequence[str]
) -> Iterator[str]:
    """Format the tables as Markdown."""
    temperatures = list(entries[0].benches)
    benches = {(each.name, t): read_bench(each.benches[t]) for each in entries for t in temperatures}
    known = [(t, growth) for t in temperatures for growth in growths]
    if not any(bench.cells for bench in benches.values()) and not any(each.ranks.is_file() for each in entries):
        raise OptionError("No figures yet", next_step="Run the stages bench and ranks first.")
    headings = [f"T={t}: {growth}" if growth == growths[0] else growth for t, growth in known]
    rows: list[Sequence[str]] = []
    for each in entries:
        found = [benches[each.name, t].cells.get(growth, {}) for t, growth in known]
        rows.append((each.name, *_training(each.run), *(_tau(cells.get(ALL_TASKS)) for cells in found)))
    yield from _table(["tokens a pass (95%)", "steps", "seconds", *headings], rows)
    for t in temperatures:
        for growth in growths:
            by_task = [(each.name, benches[each.name, t].cells.get(growth, {})) for each in entries]
            rows = [(name, *(_tau(cells.get(task)) for task in tasks)) for name, cells in by_task]
            yield from _table([f"T={t}, {growth}", *tasks], rows)
    yield from _pairs(benches, pairs, known, headings)
    yield from _ranks(entries)
    for (name, t), bench in benches.items():
        for growth, of_tasks in bench.cells.items():
            if told := _trouble(of_tasks[ALL_TASKS]):
                yield f"- {name}, T={t}, {growth}: {told}"


def _pairs(
    benches: Mapping[tuple[str, str], Bench],
    pairs: Sequence[tuple[str, str]],
    known: Sequence[tuple[str, str]],
    headings: Sequence[str],
) -> Iterator[str]:
    rows, notes = [], []
    for ours, theirs in pairs:
        cells = []
        for t, growth in known:
            both = (benches.get((name, t), Bench({}, {})).records.get(growth, {}) for name in (ours, theirs))
            found = paired(*both)
            cells.append(_change(found))
            if found is not None and found.shared < found.most:
                where = f"{ours} over {theirs}, T={t}, {growth}"
                notes.append(f"- {where}: {found.shared} requests in common of {found.most}")
        rows.append((f"{ours} over {theirs}", *cells))
    yield from _table(["tokens a pass by prompts that both have (95%)", *headings], rows)
    yield from notes


def _ranks(entries: Sequence[Entry]) -> Iterator[str]:
    """Accuracy after the text and after the head's n-th token; calibration error in brackets."""
    rows = []
    for each in entries:
        if each.ranks.is_file():
            worth = json.loads(each.ranks.read_text(encoding="utf-8"))["worth"] or {}
            below = [f"{rank['accuracy']:.3f} ({rank['ece']:.2f})" for rank in worth.get("ranks", [])]
            rows.append((each.name, f"{worth['accuracy']:.3f}" if "accuracy" in worth else NOTHING, *below))
    most = max((len(row) for row in rows), default=2) - 2
    numbers = [f"n={number}" if number == 1 else str(number) for number in range(1, most + 1)]
    if rows:
        yield from _table(["right (calibration error)", "behind the text", *numbers], rows)


def _training(run: Path) -> tuple[str, str]:
    """Steps and seconds of a run; empty for a given head."""
    trained = [line for line in read_log(run / "log.jsonl") if line["kind"] == "train"]
    return (f"{len(trained):,}", f"{sum(line['seconds'] for line in trained):.0f}") if trained else (NOTHING, NOTHING)


def _tau(cell: Cell | None) -> str:
    tau = None if cell is None else cell.tau
    return NOTHING if tau is None else f"{tau.value:.2f} ({tau.low:.2f}-{tau.high:.2f})"


def _change(found: Paired | None) -> str:
    if found is None:
        return NOTHING
    value, low, high = found.change
    return f"{value:+.1f}% ({low:.1f} to {high:.1f})"


def _trouble(cell: Cell) -> str:
    verdicts = [f"{number} {verdict}" for verdict, number in cell.lossless.items()]
    told = verdicts if {*cell.lossless} - {IDENTICAL} else []
    told += [f"{cell.errors} of {cell.errors + cell.requests} requests failed"] if cell.errors else []
    return ", ".join(told)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headings)} |"
    yield "| --- " * len(headings) + "|"
    for row in rows:
        yield f"| {' | '.join([*row, *[NOTHING] * (len(headings) - len(row))])} |"
    yield ""
