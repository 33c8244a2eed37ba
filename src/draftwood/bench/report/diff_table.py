"""Changes between two runs as a table, most important first."""

import math
from collections.abc import Sequence

from draftwood.bench.figures import ALL_METHODS, ALL_TASKS, METRICS, OTHER, SAME, UNKNOWN, WORSE, Change

Row = tuple[str, ...]
HEADER: Row = ("method", "task", "figure", "change", "before", "after", "ratio", "99%", "note")


def format_changes(changes: Sequence[Change]) -> list[Row]:
    """Format a header and rows. Unchanged figures of single tasks are omitted."""
    shown = sorted((change for change in changes if _is_shown(change, changes)), key=_importance)
    return [HEADER, *map(_format_row, shown)]


def summarize_hidden_changes(changes: Sequence[Change]) -> str | None:
    """Summarize what the table omits."""
    if not changes:
        return "The runs have nothing in common."
    left = len(changes) - (len(format_changes(changes)) - 1)
    return f"{left} more figures of single tasks: same within noise, or too few prompts" if left else None


def _is_shown(change: Change, changes: Sequence[Change]) -> bool:
    """Hide unchanged figures of a single task if the mean over tasks is shown."""
    if change.metric not in METRICS or change.verdict not in (SAME, UNKNOWN) or change.task == ALL_TASKS:
        return True
    overall = (change.method, change.metric, ALL_TASKS)
    return not any((other.method, other.metric, other.task) == overall for other in changes)


def _importance(change: Change) -> tuple[int, int, bool, float]:
    """Sort key: wrong outputs, different settings, changes by metric and size, the rest."""
    ranks = {WORSE: 0, OTHER: 1, SAME: 3, UNKNOWN: 4}
    metric = METRICS.index(change.metric) if change.metric in METRICS else len(METRICS)
    size = abs(math.log(change.ratio.value)) if change.ratio is not None and change.ratio.value > 0 else 0.0
    return ranks.get(change.verdict, 2), metric, change.task != ALL_TASKS, -size


def _format_row(change: Change) -> tuple[str, ...]:
    ratio = change.ratio
    return (
        "all methods" if change.method == ALL_METHODS else change.method,
        "all tasks" if change.task == ALL_TASKS else change.task,
        change.metric,
        change.verdict,
        _format_figure(change.before),
        _format_figure(change.after),
        "" if ratio is None else f"x{ratio.value:.3f}",
        "" if ratio is None else f"{ratio.low:.3f}-{ratio.high:.3f}",
        change.note,
    )


def _format_figure(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.2f}"
