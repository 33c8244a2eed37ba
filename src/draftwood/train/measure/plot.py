"""Plot a training log: loss and tau over steps, as an SVG file."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from draftwood.plots import Line, assign_marks, plot_lines, svg_file

MAX_POINTS = 400  # per line; more cannot be distinguished

Points = Sequence[tuple[float, float]]


def plot_log(lines: Sequence[Mapping[str, Any]], title: str) -> str:
    """Plot the lines of a log as `logs.read_log` returns them."""
    trained = [line for line in lines if line.get("kind") == "train"]
    validated = [line for line in lines if line.get("kind") == "validate"]
    losses: dict[str, Points] = {
        "training": average_points([(line["step"], line["loss"]) for line in trained]),
        "held out": [(line["step"], line["loss"]) for line in validated if "loss" in line],
    }
    names = dict.fromkeys(name for line in validated for name in line.get("trees", {}))
    taus: dict[str, Points] = {
        name: [(line["step"], line["trees"][name]["tau"]) for line in validated if name in line.get("trees", {})]
        for name in names
    }
    panels = []
    for name, curves in (("loss", losses), ("tau", taus)):
        marks = assign_marks(list(curves), has_legend=False)
        items = [Line(marks[label], dict(points)) for label, points in curves.items()]
        if any(math.isfinite(y) for item in items for y in item.points.values()):
            panels.append(plot_lines(items, title=name, x_name="step", y_name=name))
    return svg_file(title, panels)


def average_points(points: Points) -> Points:
    """Average neighbouring points so that at most `MAX_POINTS` remain. Drop those that are not finite."""
    usable = [(x, y) for x, y in points if math.isfinite(y)]
    size = max(1, math.ceil(len(usable) / MAX_POINTS))
    groups = [usable[start : start + size] for start in range(0, len(usable), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
