"""A finished plot, inline in a page that brings the style sheet or in an SVG file of its own.

Horizontal positions are percentages of the plot area, vertical positions are pixels. A plot therefore fills any
width while its text and strokes keep their size.
"""

import math
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import NamedTuple

from draftwood.plots import svg

WIDTH = 720  # pixels, of a file
HEADING, PADDING = 34, 16
XMLNS = "http://www.w3.org/2000/svg"


class Drawing(NamedTuple):
    """The elements of a plot. Labels may lie in the margins, outside 0% to 100%."""

    elements: Sequence[str]
    left: float  # margins in pixels
    right: float
    height: float
    title: str
    description: str  # for screen readers

    def inline(self) -> str:
        """Return an ``<svg>`` that fills the width of its parent."""
        margins = math.ceil(self.left) + math.ceil(self.right)
        style = f"margin-left:{self.left:.0f}px;width:calc(100% - {margins}px)"
        return self._svg(height=self.height, class_="plot", style=style)

    def _svg(self, **attributes: object) -> str:
        names = [svg.element(name, svg.escape_text(content)) for name, content in self._names()]
        return svg.element("svg", *names, *self.elements, xmlns=XMLNS, role="img", aria_label=self.title, **attributes)

    def _names(self) -> list[tuple[str, str]]:
        return [("title", self.title), ("desc", self.description)]


def svg_file(title: str, drawings: Sequence[Drawing]) -> str:
    """Return an SVG file with the drawings below each other, aligned at their axes."""
    left = max((drawing.left for drawing in drawings), default=0) + PADDING
    right = max((drawing.right for drawing in drawings), default=0) + PADDING
    top = float(HEADING)
    panels = []
    for drawing in drawings:
        size = {"x": left, "y": top, "width": WIDTH - left - right, "height": drawing.height}
        panels.append(drawing._svg(**size, class_="plot", overflow="visible"))
        top += drawing.height + PADDING
    heading = svg.text(title, x=PADDING, y=20, class_="title")
    return svg.element(
        "svg",
        svg.tooltip(title),
        svg.element("style", _resolve_variables(read_style())),
        svg.element("rect", width="100%", height="100%", class_="paper"),
        svg.group(heading, *panels, class_="plot"),
        xmlns=XMLNS,
        width=WIDTH,
        height=top,
        viewBox=f"0 0 {WIDTH} {top:g}",
    )


def read_style() -> str:
    """Return the style sheet that inline drawings need."""
    return files("draftwood.plots").joinpath("style.css").read_text(encoding="utf-8")


def _resolve_variables(style: str) -> str:
    """Replace ``var(--name)`` by its value: many SVG viewers do not know CSS variables."""
    values = dict(re.findall(r"--([\w-]+): ([^;]+);", style))
    return re.sub(
        r"var\(--([\w-]+)\)", lambda match: values[match[1]], re.sub(r":root \{.*?\n\}\n", "", style, flags=re.S)
    )
