"""Building blocks of an SVG plot: elements, relative positions and wrapped labels."""

import math
import re
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape, quoteattr

CHARACTER = 6.7  # pixels: width of a character in the fixed-width 11 px font of labels
LINE = 13  # pixels: line height of a label
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def element(name: str, *children: str, **attributes: object) -> str:
    """Build an element. ``stroke_width`` becomes ``stroke-width``, ``class_`` becomes ``class``."""
    pairs = "".join(
        f" {key.rstrip('_').replace('_', '-')}={quoteattr(_replace_invalid(_format(value)))}"
        for key, value in attributes.items()
        if value is not None
    )
    content = "".join(children)
    return f"<{name}{pairs}>{content}</{name}>" if content else f"<{name}{pairs}/>"


def escape_text(content: str) -> str:
    return escape(_replace_invalid(content))


def text(content: str, **attributes: object) -> str:
    return element("text", escape_text(content), **attributes)


def tooltip(content: str) -> str:
    return element("title", escape_text(content))


def group(*children: str, **attributes: object) -> str:
    return element("g", *children, **attributes)


def percent(share: float) -> str:
    """Format a horizontal position. Negative and non-finite values become 0."""
    return f"{100 * max(0.0, share):.3f}%" if math.isfinite(share) else "0%"


def spread(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions as little as possible so that they are ``gap`` apart, in order and, if they fit, within bounds."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    moved = [0.0] * len(positions)
    at = -math.inf
    for index in order:
        at = max(positions[index], at + gap, low)
        moved[index] = at
    at = math.inf
    for index in reversed(order):  # move back what the first pass pushed beyond the upper bound
        at = min(moved[index], at - gap, high)
        moved[index] = at
    return moved


def split_label(label: str) -> list[str]:
    """Split a label after its separators, where a line may break."""
    return re.findall(r"[^\s,:=+/@]*[\s,:=+/@]|[^\s,:=+/@]+", label)


def wrap_label(label: str, width: int) -> list[str]:
    """Wrap a label into lines of at most ``width`` characters, after separators where possible."""
    lines = [""]
    for piece in split_label(label):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.strip() for line in lines if line.strip()] or [""]


def multiline_text(lines: Iterable[str], x: object, middle: float, **attributes: object) -> str:
    """Build lines of text, centred vertically at ``middle``."""
    rows = list(lines)
    top = middle - (len(rows) - 1) * LINE / 2 + 4
    spans = [element("tspan", escape_text(row), x=x, y=top + index * LINE) for index, row in enumerate(rows)]
    return element("text", *spans, **attributes)


def _format(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _replace_invalid(content: str) -> str:
    """Replace characters that XML does not allow."""
    return _NOT_XML.sub("\ufffd", content)
