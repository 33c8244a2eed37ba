"""Tables as data, shared by Markdown and HTML, and helpers that look up figures."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftwood.bench.figures import ALL_TASKS, Cell, Summary
from draftwood.bench.records import PEER
from draftwood.bench.report import text

STAGES = ("draft", "verify", "accept", "other")


class Entry(NamedTuple):
    """A table cell."""

    text: str
    number: float | None = None  # sort key
    alert: bool = False  # highlight an error


class Column(NamedTuple):
    name: str
    numeric: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Columns and rows; the first entry of a row is its name."""

    caption: str
    columns: list[Column]
    rows: list[list[Entry]]

    @property
    def has_long_names(self) -> bool:  # read by the template of the page
        return any(len(row[0].text) > 20 for row in self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading with tables."""

    key: str
    title: str
    short: str  # for the table of contents
    note: str = ""
    tables: list[Table] = field(default_factory=list)


def labels(summary: Summary) -> list[str]:
    return [str(method["label"]) for method in summary.methods]


def is_peer(method: dict[str, Any]) -> bool:
    return method.get("kind") == PEER


def cell(summary: Summary, label: str, task: str = ALL_TASKS) -> Cell:
    """Return a method's figures; an empty cell if it did not run."""
    return summary.cells.get((label, task)) or Cell(method=label, task=task)


def figure(value: Any, decimals: int = 2, unit: str = "") -> Entry:
    return Entry(text.number(value, decimals, unit), text.finite(value))


def interval(value: Any, decimals: int = 2, unit: str = "") -> Entry:
    return Entry(text.with_interval(value, decimals, unit), text.finite(value))


def num_prompts(summary: Summary, task: str) -> int:
    """Count the prompts of a task with results, or, without results, the requested ones."""
    answered = max((cell(summary, label, task).prompts for label in labels(summary)), default=0)
    task_facts = (summary.manifest.get("tasks") or {}).get(task) or {}
    return answered or int(task_facts.get("prompts") or 0)


def prompts_note(summary: Summary) -> str:
    """``25 prompts in 5 tasks``; empty if a count is unknown."""
    counts = [num_prompts(summary, task) for task in summary.tasks]
    if not counts or not all(counts):
        return ""
    return f"{text.counted(sum(counts), 'prompt')} in {text.counted(len(counts), 'task')}"


def intervals_note(summary: Summary) -> str:
    """Describe the intervals and the number of prompts."""
    over = prompts_note(summary)
    size = (summary.manifest.get("settings") or {}).get("batch") or 1
    shared = f" Batches of {size} prompts: times are resampled by batch, and a single batch has zero width."
    return f"Intervals: 95% bootstrap over prompts{f' ({over})' if over else ''}.{shared if size > 1 else ''}"


def stages(summary: Summary) -> list[str]:
    """List the timed stages of a cycle, the standard ones first."""
    found = {name for label in labels(summary) for name in cell(summary, label).cycle_ms}
    return [name for name in STAGES if name in found] + sorted(found - set(STAGES))


def p_ratio(found: Cell) -> float | None:
    p_s, p_t = text.finite(found.p_s), text.finite(found.p_t)
    return p_s / p_t if p_s is not None and p_t else None


def families(summary: Summary) -> dict[str, dict[int | str, str]]:
    """Group methods that differ only in budget: labels by budget, smallest first, for families of several."""
    found: dict[str, dict[int | str, str]] = {}
    for method in summary.methods:
        label = str(method["label"])
        if method.get("budget") is not None and text.finite(cell(summary, label).tau) is not None:
            found.setdefault(str(method.get("family") or label), {})[method["budget"]] = label
    return {name: dict(sorted(by.items(), key=by_size)) for name, by in found.items() if len(by) > 1}


def by_size(item: tuple[int | str, Any]) -> tuple[bool, float, str]:
    size = text.finite(item[0])
    return (size is None, size or 0.0, str(item[0]))
