"""Small drawings as inline SVG: elements, scales, and the wrapping of labels.

Places along the width are percentages of the plot, places along the height are pixels. So a drawing fills whatever
width the page has, a phone's or a screen's, while its text and strokes keep their size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

CHARACTER = 6.7  # width of a character of a label, pixels: 11 px, fixed width
LINE = 13  # height of a line of a label
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def element(name: str, *inside: str, **attributes: object) -> str:
    """An element with attributes (``stroke_width`` becomes ``stroke-width``, ``class_`` becomes ``class``)."""
    pairs = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(_clean(_written(value)))}"
        for key, value in attributes.items()
        if value is not None
    )
    content = "".join(inside)
    return f"<{name}{pairs}>{content}</{name}>" if content else f"<{name}{pairs}/>"


def plain_text(content: str) -> str:
    """Text that may stand inside an element."""
    return escape(_clean(content))


def text(content: str, **attributes: object) -> str:
    return element("text", plain_text(content), **attributes)


def tooltip(content: str) -> str:
    return element("title", plain_text(content))


def group(*inside: str, **attributes: object) -> str:
    return element("g", *inside, **attributes)


def percent(share: float) -> str:
    """A place along the width; at least 0, and a number whatever comes in."""
    return f"{100 * max(0.0, share):.3f}%" if math.isfinite(share) else "0%"


def drawing(*inside: str, left: float, right: float, height: float, title: str, description: str) -> str:
    """A whole drawing with its name and description for those who cannot see it.

    Percentages are of the space between the margins (pixels); names stand in the margins, at places outside of it.
    """
    return element(
        "svg",
        element("title", plain_text(title)),
        element("desc", plain_text(description)),
        *inside,
        xmlns="http://www.w3.org/2000/svg",
        role="img",
        aria_label=title,
        height=height,
        class_="plot",
        style=f"margin-left:{left:.0f}px;width:calc(100% - {math.ceil(left) + math.ceil(right)}px)",
    )


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """The places moved as little as needed to be a gap apart, in their order, within bounds if there is room."""
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved = [0.0] * len(places)
    at = -math.inf
    for index in order:
        at = max(places[index], at + gap, low)
        moved[index] = at
    at = math.inf
    for index in reversed(order):  # what was pushed below the edge comes back up
        at = min(moved[index], at - gap, high)
        moved[index] = at
    return moved


def pieces(label: str) -> list[str]:
    """A label cut behind its separators: where it may be broken."""
    return re.findall(r"[^\s,:=+/@]*[\s,:=+/@]|[^\s,:=+/@]+", label)


def wrap(label: str, width: int) -> list[str]:
    """A label in lines of at most so many characters, broken behind its separators where that is possible."""
    lines = [""]
    for piece in pieces(label):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.strip() for line in lines if line.strip()] or [""]


def label(lines: Iterable[str], x: object, middle: float, **attributes: object) -> str:
    """Lines of text one below the other, centred at a height."""
    rows = list(lines)
    top = middle - (len(rows) - 1) * LINE / 2 + 4
    spans = [element("tspan", plain_text(row), x=x, y=top + index * LINE) for index, row in enumerate(rows)]
    return element("text", *spans, **attributes)


def _written(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _clean(content: str) -> str:
    """Without the characters that no XML may have."""
    return _NOT_XML.sub("\ufffd", content)
