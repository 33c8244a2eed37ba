"""Horizontal bars with intervals, and stacked bars."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from draftwood.display import ticks
from draftwood.plots import svg
from draftwood.plots.drawing import Drawing
from draftwood.plots.marks import Mark

ROW, BAR = 24, 12  # pixels
AXIS = 24  # pixels below a plot


class Bar(NamedTuple):
    """A value with its interval. A value that is None or not finite is shown as "not measured"."""

    mark: Mark
    value: float | None = None
    low: float | None = None
    high: float | None = None

    def describe(self, decimals: int, unit: str) -> str:
        """Format as ``label: 1.84x (1.71-1.97)``."""
        if not _is_finite(self.value):
            return f"{self.mark.label}: not measured"
        bounds = (
            f" ({self.low:.{decimals}f}-{self.high:.{decimals}f})"
            if _is_finite(self.low) and _is_finite(self.high)
            else ""
        )
        return f"{self.mark.label}: {self.value:.{decimals}f}{unit}{bounds}"


class Stack(NamedTuple):
    mark: Mark
    parts: Mapping[str, float]


def plot_bars(
    items: Sequence[Bar],
    *,
    title: str,
    unit: str,
    maximum: float,
    decimals: int = 2,
    wide: bool = False,
    reference: str | None = None,
) -> Drawing:
    """Draw horizontal bars from zero with whiskers for intervals.

    ``maximum`` is the value at the right edge, so that several plots can share a scale. ``wide`` shows whole labels
    instead of keys. ``reference`` labels a dashed line at 1.
    """
    scale = maximum if math.isfinite(maximum) and maximum > 0 else 1.0
    top = 16.0 if reference else 4.0
    names = [item.mark.wrap(wide) for item in items]
    marks = [item.mark for item in items]
    rows, bottom = _draw_rows(marks, names, top, lambda row, y: _draw_bar(items[row], y, scale, decimals, unit))
    grid = _draw_grid(ticks(0.0, scale, 4), scale, top, bottom, unit, reference)
    description = ", ".join(item.describe(decimals, unit) for item in items)
    return Drawing([*grid, *rows], _margin(names), 56, bottom + AXIS, title, description)


def plot_stacks(items: Sequence[Stack], parts: Sequence[str], *, title: str, unit: str = " ms") -> Drawing:
    """Draw horizontal bars made of parts in the given order, with the sum at the end."""
    values = [{part: _positive(item.parts.get(part)) for part in parts} for item in items]
    scale = max((sum(value.values()) for value in values), default=0.0) or 1.0
    names = [item.mark.wrap(True) for item in items]
    rows, bottom = _draw_rows(
        [item.mark for item in items],
        names,
        4.0,
        lambda row, y: _draw_stack(items[row].mark, values[row], y, scale, unit),
    )
    grid = _draw_grid(ticks(0.0, scale, 5), scale, 4.0, bottom, "", None)
    description = "; ".join(
        f"{item.mark.label}: " + ", ".join(f"{part} {number:.2f}{unit}" for part, number in value.items())
        for item, value in zip(items, values, strict=True)
    )
    return Drawing([*grid, *rows], _margin(names), 72, bottom + AXIS, title, description)


def _draw_rows(
    marks: Sequence[Mark], names: Sequence[Sequence[str]], top: float, draw: Callable[[int, float], str]
) -> tuple[list[str], float]:
    """Draw rows below each other with their names at the left. Return them and the bottom of the last one."""
    bodies, labels = [], []
    for row, (mark, lines) in enumerate(zip(marks, names, strict=True)):
        height = max(float(ROW), len(lines) * svg.LINE + 8)
        middle = top + height / 2
        label = svg.multiline_text(lines, -8, middle, text_anchor="end", class_="name")
        labels.append(svg.group(svg.tooltip(mark.label), label, **mark.attributes))
        bodies.append(draw(row, middle))
        top += height
    return [*bodies, *labels], top


def _margin(names: Sequence[Sequence[str]]) -> float:
    return 12 + max((len(line) for lines in names for line in lines), default=0) * svg.CHARACTER


def _draw_grid(
    values: Sequence[float], scale: float, top: float, bottom: float, unit: str, reference: str | None
) -> list[str]:
    """Draw vertical grid lines with their numbers below, and the reference line at 1."""
    grid = []
    for value in values:
        x = svg.percent(value / scale)
        grid.append(svg.element("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid"))
        grid.append(svg.text(f"{value:g}{unit}", x=x, y=bottom + 15, text_anchor="middle", class_="tick"))
    if reference is not None and scale >= 1:
        x = svg.percent(1 / scale)
        grid.append(svg.element("line", x1=x, x2=x, y1=top - 3, y2=bottom, class_="one"))
        grid.append(svg.text(reference, x=x, y=top - 6, text_anchor="middle", class_="tick"))
    return grid


def _draw_bar(item: Bar, middle: float, scale: float, decimals: int, unit: str) -> str:
    parts = [svg.tooltip(item.describe(decimals, unit))]
    value = item.value
    if value is None or not math.isfinite(value):
        parts.append(svg.text("not measured", x="0%", dx=4, y=middle + 4, class_="tick"))
        return svg.group(*parts, **item.mark.attributes)
    low = item.low if item.low is not None and math.isfinite(item.low) else value
    high = item.high if item.high is not None and math.isfinite(item.high) else value
    left, right = svg.percent(min(low / scale, 1.0)), svg.percent(min(high / scale, 1.0))
    width = svg.percent(value / scale)
    parts.append(svg.element("rect", x="0%", width=width, y=middle - BAR / 2, height=BAR, class_="bar", rx=1.5))
    if high > low:
        ends = [(left, right, middle, middle), *((x, x, middle - 3.5, middle + 3.5) for x in (left, right))]
        parts += [svg.element("line", x1=x1, x2=x2, y1=y1, y2=y2, class_="whisker") for x1, x2, y1, y2 in ends]
    end = svg.percent(min(max(value, high) / scale, 1.0))
    parts.append(svg.text(f"{value:.{decimals}f}{unit}", x=end, dx=7, y=middle + 4, class_="value"))
    return svg.group(*parts, **item.mark.attributes)


def _draw_stack(mark: Mark, parts: Mapping[str, float], middle: float, scale: float, unit: str) -> str:
    drawn, start = [], 0.0
    for index, (part, number) in enumerate(parts.items()):
        drawn.append(
            svg.element(
                "rect",
                svg.tooltip(f"{mark.label}: {part} {number:.2f}{unit}"),
                x=svg.percent(start / scale),
                width=svg.percent(number / scale),
                y=middle - BAR / 2,
                height=BAR,
                class_=f"part part-{index % 4}",
            )
        )
        start += number
    drawn.append(svg.text(f"{start:.2f}{unit}", x=svg.percent(start / scale), dx=7, y=middle + 4, class_="value"))
    return svg.group(*drawn, **mark.attributes)


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _positive(value: float | None) -> float:
    return max(0.0, value) if value is not None and math.isfinite(value) else 0.0
