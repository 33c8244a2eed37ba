"""The sections of a report, in order."""

from collections.abc import Callable, Iterable
from typing import Any

from draftwood.bench.figures import ALL_TASKS, Cell, Summary
from draftwood.bench.records import ERROR
from draftwood.bench.report import text
from draftwood.bench.report.context_sections import missing, paper, peers
from draftwood.bench.report.tables import (
    Column,
    Entry,
    Section,
    Table,
    by_size,
    cell,
    families,
    figure,
    interval,
    intervals_note,
    is_peer,
    labels,
    p_ratio,
    stages,
)

MAX_DEPTH = 8


def sections(summary: Summary) -> list[Section]:
    """Build all sections that have content."""
    builders = (results, tau_by_task, cycle, sources, depth, latency, trajectories, budgets, paper, peers, missing)
    built = (builder(summary) for builder in builders)
    return [section for section in built if any(table.rows for table in section.tables)]


def results(summary: Summary) -> Section:
    """Build the main table: speed, acceptance length and exactness."""
    fast = summary.baseline is not None
    attribute, decimals, unit = ("speedup", 2, "x") if fast else ("tokens_per_second", 1, "")
    what = "speed-up" if fast else "tokens/s"
    columns = [
        Column("method", False),
        *(Column(task) for task in summary.tasks),
        Column(f"mean {what}"),
        Column("tau"),
    ]
    columns += [Column("tokens/s")] if fast else []
    checked = {label: exactness(summary, cell(summary, label)) for label in labels(summary)}
    compared = any(entry.text != text.NOTHING for entry in checked.values())
    columns += [Column("nodes"), *([Column("outputs", False)] if compared else [])]
    rows = []
    for method in summary.methods:
        label = str(method["label"])
        mean = cell(summary, label)
        row = [Entry(label)]
        row += [figure(getattr(cell(summary, label, task), attribute), decimals, unit) for task in summary.tasks]
        row += [interval(getattr(mean, attribute), decimals, unit), figure(mean.tau)]
        row += [figure(mean.tokens_per_second, 1)] if fast else []
        row += [figure(mean.nodes, 1), *([checked[label]] if compared else [])]
        rows.append(row)
    speed = f"Speed-up: decoding speed relative to {summary.baseline}, same prompts, same run. " if fast else ""
    note = (
        f"{speed}Mean: over the tasks. {intervals_note(summary)} tau: tokens per verification pass; nodes: positions "
        f"per pass. {_outputs_note(summary, compared)}"
    )
    title = "Speed and exactness" if compared else "Speed"
    return Section(
        key="results",
        short="Speed",
        title=title,
        note=note,
        tables=[Table(caption=what.capitalize(), columns=columns, rows=rows)],
    )


def _outputs_note(summary: Summary, compared: bool) -> str:
    if not compared:
        sampled = bool((summary.manifest.get("settings") or {}).get("temperature"))
        why = "they are sampled" if sampled else "it did not run on the same prompts"
        return f"Outputs were not compared with plain decoding: {why}."
    peers = any(is_peer(method) for method in summary.methods)
    differing = "; different: a peer computes differently, and often has other weights" if peers else ""
    return (
        "Outputs: greedy outputs compared with plain decoding; tie: the first difference is between two tokens with "
        f"nearly equal logits{differing}."
    )


def exactness(summary: Summary, mean: Cell) -> Entry:
    """Count outputs by verdict, and show whether the method was disabled."""
    if mean.method in (summary.manifest.get("failed") or {}):
        done = "" if not mean.lossless else f"{text.verdicts(mean.lossless)}, "
        return Entry(f"{done}FAILED", None, alert=True)
    return Entry(text.verdicts(mean.lossless), None, alert=bool(mean.lossless.get(ERROR)))


def tau_by_task(summary: Summary) -> Section:
    places = [*summary.tasks, ALL_TASKS]
    rows = [
        [Entry(label), *(interval(cell(summary, label, place).tau) for place in places)]
        for label in labels(summary)
        if any(text.finite(cell(summary, label, place).tau) is not None for place in places)
    ]
    columns = [Column("method", False), *(Column(task) for task in summary.tasks), Column("mean")]
    note = f"Tokens per verification pass (tau); plain decoding has 1. {intervals_note(summary)}"
    table = Table(caption="tau by task", columns=columns, rows=rows)
    return Section(key="tau", short="tau", title="Acceptance length by task", note=note, tables=[table])


def cycle(summary: Summary) -> Section:
    names = stages(summary)
    rows = []
    for label in labels(summary):
        times = cell(summary, label).cycle_ms
        if times:
            total = sum(text.finite(time) or 0.0 for time in times.values())
            rows.append([Entry(label), *(figure(times.get(name)) for name in names), figure(total)])
    columns = [Column("method", False), *(Column(name) for name in names), Column("total")]
    table = Table(caption="Milliseconds per cycle", columns=columns, rows=rows)
    return Section(
        key="cycle", short="Cycle", title="Time per cycle", note="Milliseconds per cycle, by stage.", tables=[table]
    )


def sources(summary: Summary) -> Section:
    """Build the tables of acceptance by source, p_s and p_t by task, and routes."""
    named = _shares(summary, "Acceptance by source", lambda found: found.by_source, text.number, _rates)
    expected = _shares(
        summary, "Expected acceptance by source", lambda found: found.expected_by_source, text.number, _errors
    )
    routed = _shares(summary, "Routes: shares of cycles", lambda found: found.routes, text.percent)
    note = (
        "Acceptance rate of a source's nodes below accepted nodes. p_s: copied tokens; p_t: recycled tokens. "
        "Expected: the drafter's own chances; error: their mean distance from real acceptance, over bins of chances. "
        "A route is the way in which a drafter built its tree."
    )
    tables = [table for table in (named, expected, _rates_by_task(summary), routed) if table.rows]
    return Section(key="sources", short="Sources", title="Acceptance by source", note=note, tables=tables)


def _shares(
    summary: Summary,
    caption: str,
    pick: Callable[[Cell], dict[str, float]],
    write: Callable[[Any], str],
    more: Callable[[Summary], tuple[list[Column], dict[str, list[Entry]]]] | None = None,
) -> Table:
    """Build a table with one row per method and one column per name, followed by the columns of ``more``."""
    names = list(dict.fromkeys(name for label in labels(summary) for name in pick(cell(summary, label))))
    extra_columns, extra = more(summary) if more else ([], {})
    rows = []
    for label in labels(summary):
        shares = pick(cell(summary, label))
        if shares or label in extra:
            own = [Entry(write(shares.get(name)), text.finite(shares.get(name))) for name in names]
            rows.append([Entry(label), *own, *extra.get(label, [Entry(text.NOTHING)] * len(extra_columns))])
    columns = [Column("method", False), *(Column(name) for name in names), *extra_columns]
    return Table(caption=caption, columns=columns, rows=rows)


def _rates(summary: Summary) -> tuple[list[Column], dict[str, list[Entry]]]:
    found = {label: cell(summary, label) for label in labels(summary)}
    entries = {
        label: [figure(one.p_s), figure(one.p_t), figure(p_ratio(one), 2, "x")]
        for label, one in found.items()
        if text.finite(one.p_s) is not None or text.finite(one.p_t) is not None
    }
    return ([Column("p_s"), Column("p_t"), Column("p_s / p_t")] if entries else []), entries


def _errors(summary: Summary) -> tuple[list[Column], dict[str, list[Entry]]]:
    found = {label: cell(summary, label).calibration_error for label in labels(summary)}
    entries = {label: [figure(error, 3)] for label, error in found.items() if text.finite(error) is not None}
    return ([Column("calibration error")] if entries else []), entries


def _rates_by_task(summary: Summary) -> Table:
    rows = []
    for label in labels(summary):
        found = [cell(summary, label, task) for task in summary.tasks]
        if any(p_ratio(one) is not None for one in found):
            rows.append([Entry(label), *(figure(p_ratio(one), 2, "x") for one in found)])
    columns = [Column("method", False), *(Column(task) for task in summary.tasks)]
    return Table(caption="p_s / p_t by task", columns=columns, rows=rows if len(summary.tasks) > 1 else [])


def depth(summary: Summary) -> Section:
    found = {label: cell(summary, label).by_depth[:MAX_DEPTH] for label in labels(summary)}
    deepest = max((len(rates) for rates in found.values()), default=0)
    rows = [
        [Entry(label), *(figure(rates[at] if at < len(rates) else None) for at in range(deepest))]
        for label, rates in found.items()
        if rates
    ]
    columns = [Column("method", False), *(Column(str(at + 1)) for at in range(deepest))]
    table = Table(caption="Acceptance at depth", columns=columns, rows=rows)
    note = "Share of trees with an accepted node at a depth, among trees that reach it."
    return Section(key="depth", short="Depth", title="Acceptance by depth", note=note, tables=[table])


def latency(summary: Summary) -> Section:
    """Build the table of time to first token, whole requests and peak memory, without empty columns."""
    columns: list[tuple[Column, Callable[[Cell], Entry]]] = [
        (Column("first token, ms"), lambda one: figure(one.first_token_ms, 1)),
        (Column("speed-up of whole requests"), lambda one: interval(one.whole_speedup, 2, "x")),
        (Column("peak memory"), lambda one: Entry(text.memory(one.peak_bytes), text.finite(one.peak_bytes))),
    ]
    found = {label: [make(cell(summary, label)) for _, make in columns] for label in labels(summary)}
    used = [at for at in range(len(columns)) if any(row[at].number is not None for row in found.values())]
    rows = [
        [Entry(label), *(row[at] for at in used)]
        for label, row in found.items()
        if any(row[at].number is not None for at in used)
    ]
    table = Table(caption="Requests", columns=[Column("method", False), *(columns[at][0] for at in used)], rows=rows)
    notes = ["First token: median over requests.", "Whole requests: prefill included.", ""]
    note = " ".join(notes[at] for at in used).strip()
    return Section(key="latency", short="Latency", title="Latency and memory", note=note, tables=[table])


def trajectories(summary: Summary) -> Section:
    found = {label: cell(summary, label).by_trajectories for label in labels(summary)}
    counts = sorted({count for row in found.values() for count in row})
    rows = [[Entry(label), *(figure(row.get(count)) for count in counts)] for label, row in found.items() if row]
    columns = [Column("method", False), *(Column(str(count)) for count in counts)]
    table = Table(caption="tau over the first samples of a prompt", columns=columns, rows=rows)
    note = "Mean tau over the first samples of a prompt, which share one memory."
    return Section(
        key="trajectories", short="Trajectories", title="tau by number of trajectories", note=note, tables=[table]
    )


def budgets(summary: Summary) -> Section:
    found = families(summary)
    sizes: Iterable[int | str] = {size: None for by in found.values() for size in by}
    sizes = [size for size, _ in sorted(((size, None) for size in sizes), key=by_size)]
    rows = [
        [Entry(name), *(figure(cell(summary, by[size]).tau if size in by else None) for size in sizes)]
        for name, by in found.items()
    ]
    columns = [Column("method", False), *(Column(str(size)) for size in sizes)]
    table = Table(caption="Mean tau by budget", columns=columns, rows=rows)
    note = "Mean tau by budget: the maximum number of positions per pass, root included."
    return Section(key="budget", short="Budget", title="tau by budget", note=note, tables=[table])
