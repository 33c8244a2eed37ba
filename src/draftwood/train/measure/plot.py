"""The course of a run as a picture: loss above, tau below, as an SVG file that needs nothing to be seen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from draftwood.display import ticks

WIDTH, HEIGHT = 720, 230  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 64, 130, 30, 34
COLOURS = ("#4c78a8", "#e45756", "#54a24b", "#b279a2", "#9d755d", "#72b7b2")
MOST_POINTS = 400  # of a line: more cannot be seen

Points = Sequence[tuple[float, float]]


def plot_log(lines: Sequence[Mapping[str, Any]], title: str) -> str:
    """From the lines of a log (`logs.read_log`)."""
    trained = [line for line in lines if line.get("kind") == "train"]
    validated = [line for line in lines if line.get("kind") == "validate"]
    losses: dict[str, Points] = {
        "training": thinned([(line["step"], line["loss"]) for line in trained]),
        "held out": [(line["step"], line["loss"]) for line in validated if "loss" in line],
    }
    names = dict.fromkeys(name for line in validated for name in line.get("trees", {}))
    taus: dict[str, Points] = {
        name: [(line["step"], line["trees"][name]["tau"]) for line in validated if name in line.get("trees", {})]
        for name in names
    }
    panels = [("loss", losses)] + ([("tau", taus)] if taus else [])
    drawn = [_panel(name, curves, index * HEIGHT) for index, (name, curves) in enumerate(panels)]
    height = HEIGHT * len(panels)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
    heading = f'<text x="{LEFT}" y="16" font-size="13">{escape(title)}</text>'
    ground = f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    return f'{head}font-size="11" role="img"><title>{escape(title)}</title>{ground}{heading}{"".join(drawn)}</svg>\n'


def thinned(points: Points) -> Points:
    """At most so many points, each the mean of those it stands for."""
    usable = [(x, y) for x, y in points if math.isfinite(y)]
    size = max(1, math.ceil(len(usable) / MOST_POINTS))
    groups = [usable[start : start + size] for start in range(0, len(usable), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _panel(name: str, curves: Mapping[str, Points], top: float) -> str:
    everything = [point for points in curves.values() for point in points if math.isfinite(point[1])]
    if not everything:
        return ""
    x_low, x_high = _bounds([x for x, _ in everything])
    y_low, y_high = _bounds([y for _, y in everything])
    floor, ceiling = top + HEIGHT - BOTTOM, top + TOP

    def across(x: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (x - x_low) / (x_high - x_low)

    def up(y: float) -> float:
        return floor - (floor - ceiling) * (y - y_low) / (y_high - y_low)

    parts = [_text(10, ceiling + 4, name, "start")]
    for value in ticks(y_low, y_high):
        parts.append(_line(LEFT, up(value), WIDTH - RIGHT, up(value)))
        parts.append(_text(LEFT - 6, up(value) + 4, f"{value:g}", "end"))
    parts += [_text(across(value), floor + 16, f"{value:g}", "middle") for value in ticks(x_low, x_high)]
    for place, (label, points) in enumerate(item for item in curves.items() if item[1]):
        colour = COLOURS[place % len(COLOURS)]
        places = [(across(x), up(y)) for x, y in points if math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        if len(places) <= 40:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
        parts.append(_text(WIDTH - RIGHT + 10, ceiling + 4 + 16 * place, label, "start", colour))
    return "".join(parts)


def _bounds(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>'


def _text(x: float, y: float, content: str, anchor: str, colour: str = "#444444") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(content)}</text>'
