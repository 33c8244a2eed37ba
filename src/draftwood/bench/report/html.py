"""The report as one HTML page that needs nothing beside itself: no network, no fonts, no libraries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import NamedTuple

import jinja2

from draftwood.bench.figures import ALL_TASKS, Interval, Summary
from draftwood.bench.report import text as written
from draftwood.bench.report.facts import command, facts, headline, setting, warnings
from draftwood.bench.report.sections import MAX_DEPTH, sections
from draftwood.bench.report.tables import Section, cell, families, is_peer, labels, stages
from draftwood.display import ticks
from draftwood.plots import (
    SHORT,
    Bar,
    Line,
    Mark,
    Stack,
    assign_marks,
    plot_bars,
    plot_lines,
    plot_stacks,
    read_style,
    split_label,
)

MEAN = "mean of the tasks"


class Plot(NamedTuple):
    title: str
    svg: str
    wide: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Plots that belong together, and what their colours stand for."""

    caption: str
    plots: list[Plot]
    marks: list[Mark] = field(default_factory=list)  # a legend: methods
    parts: list[str] = field(default_factory=list)  # a legend: stages of a cycle


def html_report(summaries: Sequence[Summary], *, requests_beside: bool = True) -> str:
    """The page. ``requests_beside``: whether the run's own files lie in the same folder and can be linked to."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["pieces"] = split_label
    template = environment.from_string(_resource("page.html.j2"))
    return template.render(
        title=summaries[0].title if len(summaries) == 1 else "Draftwood benchmark",
        style=read_style() + _resource("style.css"),
        script=_resource("page.js"),
        articles=[_article(summary, place) for place, summary in enumerate(summaries, start=1)],
        linked=requests_beside and sum(len(summary.runs) for summary in summaries) == 1,
    )


def _resource(name: str) -> str:
    return files("draftwood.bench.report").joinpath(name).read_text(encoding="utf-8")


def _article(summary: Summary, place: int) -> dict[str, object]:
    looks = assign_marks(labels(summary), summary.baseline)
    return {
        "id": f"s{place}",
        "title": summary.title,
        "headline": headline(summary),
        "setting": setting(summary),
        "warnings": warnings(summary),
        "facts": facts(summary),
        "command": command(summary),
        "runs": summary.runs,
        "looks": looks,
        "peers": {str(method["label"]) for method in summary.methods if is_peer(method)},
        "sections": [(section, _figure(section, summary, looks)) for section in sections(summary)],
    }


def _figure(section: Section, summary: Summary, looks: Mapping[str, Mark]) -> Figure | None:
    """The plot that goes with a section, where it has one and there is something to draw."""
    drawers = {
        "results": _speed,
        "tau": _tau,
        "cycle": _cycle,
        "depth": _depth,
        "budget": _budget,
        "trajectories": _trajectories,
    }
    return drawers[section.key](summary, looks) if section.key in drawers else None


def _speed(summary: Summary, looks: Mapping[str, Mark]) -> Figure | None:
    if summary.baseline is None:
        return _bars(summary, looks, "tokens_per_second", "Tokens per second", "", None, decimals=1)
    return _bars(summary, looks, "speedup", "Speed-up over plain decoding", "x", "plain")


def _tau(summary: Summary, looks: Mapping[str, Mark]) -> Figure | None:
    return _bars(summary, looks, "tau", "Tokens a verification pass (tau)", "", "plain")


def _bars(
    summary: Summary,
    looks: Mapping[str, Mark],
    attribute: str,
    what: str,
    unit: str,
    reference: str | None,
    decimals: int = 2,
) -> Figure | None:
    """The mean over the tasks, large, then a small plot for each task, all on one scale.

    Plain decoding is the line at 1 where there is one; methods without any such figure are left out.
    """

    def value(label: str, place: str) -> Interval | None:
        found: Interval | None = getattr(cell(summary, label, place), attribute)
        return found if written.finite(found) is not None else None

    places = [ALL_TASKS, *summary.tasks]
    shown = [label for label in looks if label != summary.baseline or reference is None]
    shown = [label for label in shown if any(value(label, place) for place in places)]
    found = [written.whole_interval(value(label, place)) for label in shown for place in places]
    maximum = max((max(one.value, one.high) for one in found if one is not None), default=0.0)
    if not shown:
        return None

    def plot(place: str, name: str, wide: bool) -> Plot:
        items = [Bar(looks[label], *(value(label, place) or ())) for label in shown]
        drawn = plot_bars(
            items,
            title=f"{what}, {name}",
            unit=unit,
            decimals=decimals,
            maximum=max(maximum, 1.0),
            wide=wide,
            reference=reference,
        )
        return Plot(name, drawn.inline(), wide)

    drawn = [plot(place, MEAN if place == ALL_TASKS else place, place == ALL_TASKS) for place in places]
    if len(summary.tasks) == 1:  # the mean of one task is that task
        drawn = [plot(summary.tasks[0], summary.tasks[0], wide=True)]
    whiskers = "Whiskers: 95% bootstrap intervals over prompts."
    line = f" Dashed line: {summary.baseline or 'plain'} decoding, 1{unit}." if reference else ""
    return Figure(caption=f"{what}. {whiskers}{line}", plots=drawn, marks=[looks[label] for label in shown])


def _cycle(summary: Summary, looks: Mapping[str, Mark]) -> Figure | None:
    names = stages(summary)
    items = [Stack(mark, cell(summary, label).cycle_ms) for label, mark in looks.items()]
    items = [item for item in items if item.parts]
    drawn = plot_stacks(items, names, title="Milliseconds a cycle, by stage")
    return Figure(
        caption="The stages stand from left to right as listed; the figure at the end is their sum.",
        plots=[Plot("", drawn.inline(), True)],
        parts=names,
    )


def _lines(
    items: Sequence[Line], what: str, x_name: str, y_name: str, low: float, high: float, logarithmic: bool
) -> Figure | None:
    drawable = [item for item in items if any(written.finite(y) is not None for y in item.points.values())]
    if not drawable:
        return None
    drawn = plot_lines(drawable, title=what, x_name=x_name, y_name=y_name, low=low, high=high, logarithmic=logarithmic)
    return Figure(
        caption=f"{what}. Each line's method stands at its right end.",
        plots=[Plot("", drawn.inline(), True)],
        marks=[item.mark for item in drawable],
    )


def _depth(summary: Summary, looks: Mapping[str, Mark]) -> Figure | None:
    items = [
        Line(mark, {float(at): rate for at, rate in enumerate(cell(summary, label).by_depth[:MAX_DEPTH], 1)})
        for label, mark in looks.items()
    ]
    what = "Acceptance by depth"
    return _lines(items, what, "depth", "share of the trees that reach it", 0.0, 1.0, logarithmic=False)


def _tau_lines(items: Sequence[Line], what: str, x_name: str) -> Figure | None:
    values = [y for item in items for y in item.points.values() if written.finite(y) is not None]
    if not any(len(item.points) > 1 for item in items) or not values:
        return None
    top = ticks(0.0, max(values) * 1.1)[-1]
    low = 1.0 if min(values) >= 1 else 0.0
    return _lines(items, what, x_name, "tau", low, max(top, max(values)), logarithmic=True)


def _budget(summary: Summary, looks: Mapping[str, Mark]) -> Figure | None:
    items = []
    for name, by in families(summary).items():
        points = {
            float(size): tau
            for size, label in by.items()
            if written.finite(size) is not None and (tau := written.finite(cell(summary, label).tau)) is not None
        }
        first = looks[next(iter(by.values()))]
        key = name if len(name) <= SHORT else first.key
        items.append(Line(replace(first, label=name, key=key), points))
    return _tau_lines(items, "Mean tau against the budget of positions a pass", "budget (logarithmic)")


def _trajectories(summary: Summary, looks: Mapping[str, Mark]) -> Figure | None:
    items = [
        Line(mark, {float(count): tau for count, tau in cell(summary, label).by_trajectories.items()})
        for label, mark in looks.items()
    ]
    items = [item for item in items if item.points]
    return _tau_lines(items, "Mean tau over the first samples of a prompt", "samples (logarithmic)")
