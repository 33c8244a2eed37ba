"""Lines over numbers, each with its markers and, at its end, its key."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from draftwood.bench.report import marks, svg
from draftwood.bench.report.marks import Mark
from draftwood.display import ticks

Place = Callable[[float], float]  # where a number is drawn


class Line(NamedTuple):
    mark: Mark
    points: dict[float, float]  # y by x


def lines(
    items: Sequence[Line], *, title: str, x_name: str, y_name: str, low: float, high: float, logarithmic: bool = False
) -> str:
    """A line an item, its marker at every point, its key at its end."""
    usable = [item._replace(points=_finite(item.points)) for item in items]
    usable = [item for item in usable if item.points]
    xs = sorted({x for item in usable for x in item.points})
    high = high if high > low else low + 1.0
    top, bottom = 22.0, 22.0 + max(220.0, 20.0 * len(usable))
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

    grid = [_row(value, down(value)) for value in ticks(low, high)]
    grid += _x_labels(xs, across, bottom)
    ends = svg.spread([down(item.points[max(item.points)]) for item in usable], 13.5, top, bottom)
    body = [_line(item, end, across, down, x_name) for item, end in zip(usable, ends, strict=True)]
    described = "; ".join(
        f"{item.mark.label}: " + ", ".join(f"{x:g} {y:.2f}" for x, y in sorted(item.points.items())) for item in usable
    )
    names = [
        svg.text(y_name, x=-40, y=11, class_="axis"),
        svg.text(x_name, x="100%", y=bottom + 36, class_="axis", text_anchor="end"),
    ]
    return svg.drawing(
        *grid,
        *body,
        *names,
        left=40,
        right=right,
        height=bottom + 42,
        title=title,
        description=described,
    )


def _finite(points: Mapping[float, float]) -> dict[float, float]:
    return {x: y for x, y in points.items() if math.isfinite(x) and math.isfinite(y)}


def _row(value: float, y: float) -> str:
    line = svg.element("line", x1="0%", x2="100%", y1=y, y2=y, class_="grid")
    return line + svg.text(f"{value:g}", x="0%", dx=-10, y=y + 4, text_anchor="end", class_="tick")


def _x_labels(xs: Sequence[float], across: Place, bottom: float) -> list[str]:
    """Numbers below the plot; one that would touch its left neighbour is left out."""
    drawn, last = [], -1.0
    for x in xs:
        place = across(x)
        if place - last >= 0.055 or x == xs[-1]:
            drawn.append(svg.text(f"{x:g}", x=svg.percent(place), y=bottom + 18, text_anchor="middle", class_="tick"))
            last = place
    return drawn


def _line(item: Line, end: float, across: Place, down: Place, x_name: str) -> str:
    """Segments, markers, and a thin leader from the last point to the key at the right edge."""
    places = [(svg.percent(across(x)), down(y), x, y) for x, y in sorted(item.points.items())]
    drawn = [
        svg.element("line", x1=a[0], y1=a[1], x2=b[0], y2=b[1], class_="line", stroke_dasharray=item.mark.dashes)
        for a, b in pairwise(places)
    ]
    drawn += [
        svg.element(
            "svg",
            svg.tooltip(f"{item.mark.label}, {x_name} {x:g}: {y:.2f}"),
            svg.element("path", d=item.mark.marker, class_="marker"),
            x=x_place,
            y=y_place,
            overflow="visible",
        )
        for x_place, y_place, x, y in places
    ]
    x, y = places[-1][:2]
    leaders = [
        svg.element("line", x1=x, y1=y, x2="100%", y2=y, class_="leader"),
        svg.element(
            "svg", svg.element("line", x1=0, y1=y, x2=18, y2=end, class_="leader"), x="100%", overflow="visible"
        ),
    ]
    key = svg.text(item.mark.key, x="100%", dx=22, y=end + 4, class_="name end")
    return svg.group(svg.tooltip(item.mark.label), *leaders, *drawn, key, **marks.look(item.mark))
