"""Bars with intervals, and stacked bars. Numbers and labels stand beside every colour."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from draftwood.bench.figures import Interval
from draftwood.bench.report import marks, svg
from draftwood.bench.report import text as written
from draftwood.bench.report.marks import Mark
from draftwood.display import ticks

ROW, BAR = 24, 12  # pixels
AXIS = 24  # below a plot


class Bar(NamedTuple):
    mark: Mark
    value: Interval | None


class Stack(NamedTuple):
    mark: Mark
    parts: Mapping[str, float]


def bars(
    items: Sequence[Bar],
    *,
    title: str,
    unit: str,
    maximum: float,
    decimals: int = 2,
    wide: bool = False,
    reference: str | None = None,
) -> str:
    """Horizontal bars from zero, with whiskers for intervals and a line at 1.

    ``maximum`` is the value at the right edge; plots side by side share it. ``wide``: whole labels, else short keys.
    """
    scale = maximum if math.isfinite(maximum) and maximum > 0 else 1.0
    names = [marks.names(item.mark, wide) for item in items]
    left = marks.margin(names)
    body, side = [], []
    top = 16.0 if reference else 4.0
    y = top
    for item, lines in zip(items, names, strict=True):
        height = max(float(ROW), len(lines) * svg.LINE + 8)
        middle = y + height / 2
        side.append(marks.beside(item.mark, lines, middle))
        body.append(_bar(item, middle, scale, decimals, unit))
        y += height
    grid = _columns(ticks(0.0, scale, 4), scale, top, y, unit, reference)
    described = ", ".join(f"{item.mark.label} {written.with_interval(item.value, decimals, unit)}" for item in items)
    height = y + AXIS
    return svg.drawing(
        *grid,
        *body,
        *side,
        left=left,
        right=56,
        height=height,
        title=title,
        description=described,
    )


def stacks(items: Sequence[Stack], parts: Sequence[str], *, title: str, unit: str = " ms") -> str:
    """Horizontal bars of parts, one behind the other, with their sum at the end."""
    values = [{part: max(0.0, written.finite(item.parts.get(part)) or 0.0) for part in parts} for item in items]
    scale = max((sum(value.values()) for value in values), default=0.0) or 1.0
    names = [marks.names(item.mark, True) for item in items]
    left = marks.margin(names)
    body, side = [], []
    y = 4.0
    for item, value, lines in zip(items, values, names, strict=True):
        height = max(float(ROW), len(lines) * svg.LINE + 8)
        middle = y + height / 2
        side.append(marks.beside(item.mark, lines, middle))
        body.append(_stack(item.mark, value, parts, middle, scale, unit))
        y += height
    grid = _columns(ticks(0.0, scale, 5), scale, 4.0, y, "", None)
    described = "; ".join(
        f"{item.mark.label}: " + ", ".join(f"{part} {value[part]:.2f}{unit}" for part in parts)
        for item, value in zip(items, values, strict=True)
    )
    return svg.drawing(
        *grid,
        *body,
        *side,
        left=left,
        right=72,
        height=y + AXIS,
        title=title,
        description=described,
    )


def _columns(
    values: Sequence[float], scale: float, top: float, bottom: float, unit: str, reference: str | None
) -> list[str]:
    """Upright grid lines with their numbers below, and the line at 1."""
    drawn = []
    for value in values:
        x = svg.percent(value / scale)
        drawn.append(svg.element("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid"))
        drawn.append(svg.text(f"{value:g}{unit}", x=x, y=bottom + 15, text_anchor="middle", class_="tick"))
    if reference is not None and scale >= 1:
        x = svg.percent(1 / scale)
        drawn.append(svg.element("line", x1=x, x2=x, y1=top - 3, y2=bottom, class_="one"))
        drawn.append(svg.text(reference, x=x, y=top - 6, text_anchor="middle", class_="tick"))
    return drawn


def _bar(item: Bar, middle: float, scale: float, decimals: int, unit: str) -> str:
    value = written.whole_interval(item.value)
    if value is None:
        unknown = svg.text("not measured", x="0%", dx=4, y=middle + 4, class_="tick")
        return svg.group(svg.tooltip(f"{item.mark.label}: not measured"), unknown, **marks.look(item.mark))
    low, high = (svg.percent(min(bound / scale, 1.0)) for bound in (value.low, value.high))
    drawn = [
        svg.tooltip(f"{item.mark.label}: {written.with_interval(item.value, decimals, unit)}"),
        svg.element(
            "rect", x="0%", width=svg.percent(value.value / scale), y=middle - BAR / 2, height=BAR, class_="bar", rx=1.5
        ),
    ]
    if value.high > value.low:
        drawn.append(svg.element("line", x1=low, x2=high, y1=middle, y2=middle, class_="whisker"))
        drawn += [
            svg.element("line", x1=x, x2=x, y1=middle - 3.5, y2=middle + 3.5, class_="whisker") for x in (low, high)
        ]
    end = svg.percent(min(max(value.value, value.high) / scale, 1.0))
    drawn.append(svg.text(written.number(value, decimals, unit), x=end, dx=7, y=middle + 4, class_="value"))
    return svg.group(*drawn, **marks.look(item.mark))


def _stack(mark: Mark, value: Mapping[str, float], parts: Sequence[str], middle: float, scale: float, unit: str) -> str:
    drawn, start = [], 0.0
    for place, part in enumerate(parts):
        drawn.append(
            svg.element(
                "rect",
                svg.tooltip(f"{mark.label}: {part} {value[part]:.2f}{unit}"),
                x=svg.percent(start / scale),
                width=svg.percent(value[part] / scale),
                y=middle - BAR / 2,
                height=BAR,
                class_=f"part part-{place % 4}",
            )
        )
        start += value[part]
    drawn.append(svg.text(f"{start:.2f}{unit}", x=svg.percent(start / scale), dx=7, y=middle + 4, class_="value"))
    return svg.group(*drawn, **marks.look(mark))
