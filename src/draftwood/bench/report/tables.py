"""Tables as data, and how they look up figures: Markdown and HTML show the same ones, so they cannot differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftwood.bench.figures import ALL_TASKS, Cell, Summary
from draftwood.bench.records import PEER
from draftwood.bench.report import text

STAGES = ("draft", "verify", "accept", "other")


class Entry(NamedTuple):
    """What stands in one place of a table."""

    text: str
    number: float | None = None  # what a column is sorted by
    alert: bool = False  # something is wrong here


class Column(NamedTuple):
    name: str
    numeric: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows under columns; the first entry of a row names it."""

    caption: str
    columns: list[Column]
    rows: list[list[Entry]]

    @property
    def has_long_names(self) -> bool:
        return any(len(row[0].text) > 20 for row in self.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A heading with the tables below it."""

    key: str
    title: str
    short: str  # for a list of contents
    note: str = ""
    tables: list[Table] = field(default_factory=list)


def labels(summary: Summary) -> list[str]:
    return [str(method["label"]) for method in summary.methods]


def is_peer(method: dict[str, Any]) -> bool:
    return method.get("kind") == PEER


def cell(summary: Summary, label: str, task: str = ALL_TASKS) -> Cell:
    """A method's figures; without any where it never ran."""
    return summary.cells.get((label, task)) or Cell(method=label, task=task)


def figure(value: Any, decimals: int = 2, unit: str = "") -> Entry:
    return Entry(text.number(value, decimals, unit), text.finite(value))


def interval(value: Any, decimals: int = 2, unit: str = "") -> Entry:
    return Entry(text.with_interval(value, decimals, unit), text.finite(value))


def num_prompts(summary: Summary, task: str) -> int:
    """Prompts of a task that figures come from: those that were answered, else those that were asked for."""
    answered = max((cell(summary, label, task).prompts for label in labels(summary)), default=0)
    told = (summary.manifest.get("tasks") or {}).get(task) or {}
    return answered or int(told.get("prompts") or 0)


def prompts_note(summary: Summary) -> str:
    """``25 prompts in 5 tasks``; nothing where that is not known for each of them."""
    counts = [num_prompts(summary, task) for task in summary.tasks]
    if not counts or not all(counts):
        return ""
    return f"{text.counted(sum(counts), 'prompt')} in {text.counted(len(counts), 'task')}"


def intervals_note(summary: Summary) -> str:
    """How the intervals were made and over how many prompts."""
    over = prompts_note(summary)
    size = (summary.manifest.get("settings") or {}).get("batch") or 1
    shared = f" {size} prompts ran together: of times, whole batches are drawn, and a single one has no width."
    return f"Intervals: 95% bootstrap over prompts{f' ({over})' if over else ''}.{shared if size > 1 else ''}"


def stages(summary: Summary) -> list[str]:
    """The parts of a cycle that were timed, the known ones first."""
    found = {name for label in labels(summary) for name in cell(summary, label).cycle_ms}
    return [name for name in STAGES if name in found] + sorted(found - set(STAGES))


def p_ratio(found: Cell) -> float | None:
    p_s, p_t = text.finite(found.p_s), text.finite(found.p_t)
    return p_s / p_t if p_s is not None and p_t else None


def families(summary: Summary) -> dict[str, dict[int | str, str]]:
    """Methods that differ in their budget alone: label by budget, smallest first, of every family with several."""
    found: dict[str, dict[int | str, str]] = {}
    for method in summary.methods:
        label = str(method["label"])
        if method.get("budget") is not None and text.finite(cell(summary, label).tau) is not None:
            found.setdefault(str(method.get("family") or label), {})[method["budget"]] = label
    return {name: dict(sorted(by.items(), key=by_size)) for name, by in found.items() if len(by) > 1}


def by_size(item: tuple[int | str, Any]) -> tuple[bool, float, str]:
    size = text.finite(item[0])
    return (size is None, size or 0.0, str(item[0]))
