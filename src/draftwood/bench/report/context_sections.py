"""Report sections on published figures, peers, and methods that did not run."""

from typing import Any

from draftwood.bench.figures import ALL_TASKS, Cell, Interval, Summary
from draftwood.bench.report import text
from draftwood.bench.report.tables import Column, Entry, Section, Table, cell, figure, interval, labels, p_ratio

BY_TRAJECTORIES = "by_trajectories"


def paper(summary: Summary) -> Section:
    """Compare a recipe's published figures with this run."""
    rows = []
    for entry in summary.manifest.get("paper") or []:
        name, metric = str(entry.get("method", "")), str(entry.get("metric", ""))
        task = str(entry.get("task") or ALL_TASKS)
        place = ALL_TASKS if task in ("mean", "all") else task
        label = _find_method(summary, name)
        decimals, unit = (
            (2, "x") if metric in ("speedup", "whole_speedup") else (1 if metric == "tokens_per_second" else 2, "")
        )
        count = entry.get("trajectories")
        ours = get_figure(cell(summary, label, place), metric, count) if label is not None else None
        measured = interval(ours, decimals, unit) if isinstance(ours, Interval) else figure(ours, decimals, unit)
        shown = Entry("not measured") if measured.number is None else measured
        what = (
            f"tau, {text.counted(count, 'trajectory', 'trajectories')}"
            if metric == BY_TRAJECTORIES and count
            else metric
        )
        whose = entry.get("label") or entry.get("model")
        where = "mean" if place == ALL_TASKS else task
        rows.append(
            [
                Entry(name),
                Entry(where),
                Entry(f"{what} ({whose})" if whose else what),
                _format_published(entry.get("value"), decimals, unit),
                shown,
            ]
        )
    columns = [Column("method", False), Column("task", False), Column("figure", False), Column("paper"), Column("here")]
    table = Table(caption="Published and measured", columns=columns, rows=rows)
    note = "Published figures are from the paper's models and hardware, measured ones from this run."
    return Section(key="paper", short="Paper", title="Comparison with the paper", note=note, tables=[table])


def _format_published(value: Any, decimals: int, unit: str) -> Entry:
    return (
        figure(value, decimals, unit)
        if text.finite(value) is not None
        else Entry(text.NOTHING if value is None else str(value))
    )


def _find_method(summary: Summary, name: str) -> str | None:
    """Find the method with this label, or the only method of this family."""
    if name in labels(summary):
        return name
    relatives = [str(method["label"]) for method in summary.methods if method.get("family") == name]
    return relatives[0] if len(relatives) == 1 else None


def get_figure(found: Cell, metric: str, count: int | None = None) -> Any:
    """Get a figure of a cell by its name in a recipe; ``count``: number of trajectories."""
    if metric == BY_TRAJECTORIES:
        return found.by_trajectories.get(count) if count is not None else None
    if metric == "p_ratio":
        return p_ratio(found)
    value = getattr(found, metric, None)
    return None if isinstance(value, (dict, list, str)) else value


def peers(summary: Summary) -> Section:
    """List notes on peers: versions, dtypes, other weights."""
    noted = [(str(method["label"]), str(method["note"])) for method in summary.methods if method.get("note")]
    columns = [Column("peer", False), Column("note", False)]
    table = Table(caption="Peers", columns=columns, rows=[[Entry(label), Entry(note)] for label, note in noted])
    return Section(key="peers", short="Peers", title="Notes on peers", tables=[table])


def missing(summary: Summary) -> Section:
    """List disabled methods, failed requests and absent peers, each with the reason."""
    given_up = summary.manifest.get("failed") or {}
    rows = [[Entry(label), Entry("failed", None, alert=True), Entry(reason)] for label, reason in given_up.items()]
    for label in labels(summary):
        found = cell(summary, label)
        if found.errors:
            reason = f"{text.counted(found.errors, 'request')} failed; see the errors in requests.jsonl"
            rows.append([Entry(label), Entry("requests failed", None, alert=True), Entry(reason)])
    absent = summary.manifest.get("absent") or {}
    rows += [[Entry(label), Entry("absent"), Entry(reason)] for label, reason in absent.items()]
    columns = [Column("method", False), Column("state", False), Column("reason", False)]
    table = Table(caption="Failed and absent", columns=columns, rows=rows)
    return Section(key="missing", short="Missing", title="What did not run", tables=[table])
