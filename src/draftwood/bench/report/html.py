"""The report as one self-contained HTML page: no network, fonts or libraries."""

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

MEAN = "mean over tasks"


class Plot(NamedTuple):
    title: str
    svg: str
    wide: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotGroup:
    """The plots of a section with their legend."""

    caption: str
    plots: list[Plot]
    marks: list[Mark] = field(default_factory=list)  # legend: methods
    parts: list[str] = field(default_factory=list)  # legend: stages of a cycle


def html_report(summaries: Sequence[Summary], *, link_requests: bool = True) -> str:
    """Render the page. ``link_requests``: the run's files are in the same folder and can be linked."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters["pieces"] = split_label
    template = environment.from_string(_read_resource("page.html.j2"))
    return template.render(
        title=summaries[0].title if len(summaries) == 1 else "Draftwood benchmark",
        style=read_style() + _read_resource("style.css"),
        script=_read_resource("page.js"),
        articles=[_build_article(summary, place) for place, summary in enumerate(summaries, start=1)],
        linked=link_requests and sum(len(summary.runs) for summary in summaries) == 1,
    )


def _read_resource(name: str) -> str:
    return files("draftwood.bench.report").joinpath(name).read_text(encoding="utf-8")


def _build_article(summary: Summary, place: int) -> dict[str, object]:
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
        "sections": [(section, _draw_section(section, summary, looks)) for section in sections(summary)],
    }


def _draw_section(section: Section, summary: Summary, looks: Mapping[str, Mark]) -> PlotGroup | None:
    """Draw the plots of a section; None if it has none."""
    drawers = {
        "results": _draw_speed,
        "tau": _draw_tau,
        "cycle": _draw_cycle,
        "depth": _draw_depth,
        "budget": _draw_budgets,
        "trajectories": _draw_trajectories,
    }
    return drawers[section.key](summary, looks) if section.key in drawers else None


def _draw_speed(summary: Summary, looks: Mapping[str, Mark]) -> PlotGroup | None:
    if summary.baseline is None:
        return _draw_bars(summary, looks, "tokens_per_second", "Tokens per second", "", None, decimals=1)
    return _draw_bars(summary, looks, "speedup", "Speed-up over plain decoding", "x", "plain")


def _draw_tau(summary: Summary, looks: Mapping[str, Mark]) -> PlotGroup | None:
    return _draw_bars(summary, looks, "tau", "Tokens per verification pass (tau)", "", "plain")


def _draw_bars(
    summary: Summary,
    looks: Mapping[str, Mark],
    attribute: str,
    what: str,
    unit: str,
    reference: str | None,
    decimals: int = 2,
) -> PlotGroup | None:
    """Draw the mean over tasks, then a small plot per task, all on one scale.

    Plain decoding is the line at 1, if it ran; methods without the figure are omitted.
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
    if len(summary.tasks) == 1:  # the mean of one task is the task
        drawn = [plot(summary.tasks[0], summary.tasks[0], wide=True)]
    whiskers = "Whiskers: 95% bootstrap intervals over prompts."
    line = f" Dashed line: {summary.baseline or 'plain'} decoding, 1{unit}." if reference else ""
    return PlotGroup(caption=f"{what}. {whiskers}{line}", plots=drawn, marks=[looks[label] for label in shown])


def _draw_cycle(summary: Summary, looks: Mapping[str, Mark]) -> PlotGroup | None:
    names = stages(summary)
    items = [Stack(mark, cell(summary, label).cycle_ms) for label, mark in looks.items()]
    items = [item for item in items if item.parts]
    drawn = plot_stacks(items, names, title="Milliseconds per cycle, by stage")
    return PlotGroup(
        caption="Stages from left to right as listed; the number at the end is their sum.",
        plots=[Plot("", drawn.inline(), True)],
        parts=names,
    )


def _draw_lines(
    items: Sequence[Line], what: str, x_name: str, y_name: str, low: float, high: float, logarithmic: bool
) -> PlotGroup | None:
    drawable = [item for item in items if any(written.finite(y) is not None for y in item.points.values())]
    if not drawable:
        return None
    drawn = plot_lines(drawable, title=what, x_name=x_name, y_name=y_name, low=low, high=high, logarithmic=logarithmic)
    return PlotGroup(
        caption=f"{what}. Labels are at the right end of each line.",
        plots=[Plot("", drawn.inline(), True)],
        marks=[item.mark for item in drawable],
    )


def _draw_depth(summary: Summary, looks: Mapping[str, Mark]) -> PlotGroup | None:
    items = [
        Line(mark, {float(at): rate for at, rate in enumerate(cell(summary, label).by_depth[:MAX_DEPTH], 1)})
        for label, mark in looks.items()
    ]
    what = "Acceptance by depth"
    return _draw_lines(items, what, "depth", "share of trees that reach it", 0.0, 1.0, logarithmic=False)


def _draw_tau_lines(items: Sequence[Line], what: str, x_name: str) -> PlotGroup | None:
    values = [y for item in items for y in item.points.values() if written.finite(y) is not None]
    if not any(len(item.points) > 1 for item in items) or not values:
        return None
    top = ticks(0.0, max(values) * 1.1)[-1]
    low = 1.0 if min(values) >= 1 else 0.0
    return _draw_lines(items, what, x_name, "tau", low, max(top, max(values)), logarithmic=True)


def _draw_budgets(summary: Summary, looks: Mapping[str, Mark]) -> PlotGroup | None:
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
    return _draw_tau_lines(items, "Mean tau by budget", "budget: positions per pass (logarithmic)")


def _draw_trajectories(summary: Summary, looks: Mapping[str, Mark]) -> PlotGroup | None:
    items = [
        Line(mark, {float(count): tau for count, tau in cell(summary, label).by_trajectories.items()})
        for label, mark in looks.items()
    ]
    items = [item for item in items if item.points]
    return _draw_tau_lines(items, "Mean tau over the first samples of a prompt", "samples (logarithmic)")
