"""Line plots: each line ends in the key of its series."""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from draftwood.display import ticks
from draftwood.plots import svg
from draftwood.plots.drawing import Drawing
from draftwood.plots.marks import Mark

MAX_MARKERS = 40  # a line with more points has no markers
MAX_X_VALUES = 16  # above, ticks are labelled instead of values
MIN_X_GAP = 0.055  # of the width, between two labels

Scale = Callable[[float], float]  # from a number to its position


class Line(NamedTuple):
    mark: Mark
    points: Mapping[float, float]  # y by x


def plot_lines(
    items: Sequence[Line],
    *,
    title: str,
    x_name: str,
    y_name: str,
    low: float | None = None,
    high: float | None = None,
    logarithmic: bool = False,  # the x axis
) -> Drawing:
    """Draw a line per item. ``low`` and ``high`` bound the y axis; by default the data do."""
    usable = [item._replace(points=_select_finite(item.points)) for item in items]
    usable = [item for item in usable if item.points]
    xs = sorted({x for item in usable for x in item.points})
    low, high = _find_bounds([y for item in usable for y in item.points.values()], low, high)
    top, bottom = 22.0, 22.0 + max(220.0, 20.0 * len(usable))
    rows = ticks(low, high)
    left = max(40.0, 14 + max(len(f"{value:g}") for value in rows) * svg.CHARACTER)
    right = max((len(item.mark.key) for item in usable), default=0) * svg.CHARACTER + 34

    def across(x: float) -> float:
        first, last = xs[0], xs[-1]
        if first == last:
            return 0.5
        if logarithmic and first > 0:
            return (math.log(x) - math.log(first)) / (math.log(last) - math.log(first))
        return (x - first) / (last - first)

    def down(y: float) -> float:
        return bottom - (min(max(y, low), high) - low) / (high - low) * (bottom - top)

    ends = svg.spread([down(item.points[max(item.points)]) for item in usable], 13.5, top, bottom)
    elements = [
        *(_draw_row(value, down(value)) for value in rows),
        *_draw_x_labels(xs if logarithmic or len(xs) <= MAX_X_VALUES else ticks(xs[0], xs[-1], 8), across, bottom),
        *(_draw_line(item, end, across, down, x_name) for item, end in zip(usable, ends, strict=True)),
        svg.text(y_name, x=-left, y=11, class_="axis"),
        svg.text(x_name, x="100%", y=bottom + 36, class_="axis", text_anchor="end"),
    ]
    description = "; ".join(
        f"{item.mark.label}: " + ", ".join(f"{x:g} {y:.2f}" for x, y in sorted(item.points.items())) for item in usable
    )
    return Drawing(elements, left, right, bottom + 42, title, description)


def _select_finite(points: Mapping[float, float]) -> dict[float, float]:
    return {x: y for x, y in points.items() if math.isfinite(x) and math.isfinite(y)}


def _find_bounds(values: Sequence[float], low: float | None, high: float | None) -> tuple[float, float]:
    low = min(values, default=0.0) if low is None else low
    high = max(values, default=1.0) if high is None else high
    return (low, high) if high > low else (low, low + 1.0)


def _draw_row(value: float, y: float) -> str:
    line = svg.element("line", x1="0%", x2="100%", y1=y, y2=y, class_="grid")
    return line + svg.text(f"{value:g}", x="0%", dx=-10, y=y + 4, text_anchor="end", class_="tick")


def _draw_x_labels(values: Sequence[float], across: Scale, bottom: float) -> list[str]:
    """Label the values below the plot. Omit those that would overlap, never the last one."""
    shown: list[float] = []
    for value in reversed(values):
        if not shown or across(shown[-1]) - across(value) >= MIN_X_GAP:
            shown.append(value)
    return [
        svg.text(f"{value:g}", x=svg.percent(across(value)), y=bottom + 18, text_anchor="middle", class_="tick")
        for value in reversed(shown)
    ]


def _draw_line(item: Line, end: float, across: Scale, down: Scale, x_name: str) -> str:
    """Draw segments, markers, and a thin leader from the last point to the key at the right edge."""
    points = [(svg.percent(across(x)), down(y), x, y) for x, y in sorted(item.points.items())]
    segments = [
        svg.element("line", x1=a[0], y1=a[1], x2=b[0], y2=b[1], class_="line", stroke_dasharray=item.mark.dashes)
        for a, b in pairwise(points)
    ]
    markers = [
        svg.element(
            "svg",
            svg.tooltip(f"{item.mark.label}, {x_name} {x:g}: {y:.2f}"),
            svg.element("path", d=item.mark.marker, class_="marker"),
            x=left,
            y=top,
            overflow="visible",
        )
        for left, top, x, y in (points if len(points) <= MAX_MARKERS else [])
    ]
    x, y = points[-1][:2]
    leaders = [
        svg.element("line", x1=x, y1=y, x2="100%", y2=y, class_="leader"),
        svg.element(
            "svg", svg.element("line", x1=0, y1=y, x2=18, y2=end, class_="leader"), x="100%", overflow="visible"
        ),
    ]
    key = svg.text(item.mark.key, x="100%", dx=22, y=end + 4, class_="name end")
    return svg.group(svg.tooltip(item.mark.label), *leaders, *segments, *markers, key, **item.mark.attributes)
