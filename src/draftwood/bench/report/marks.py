"""How a method looks in every plot of a page: a colour, a marker, dashes, and a number or label beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftwood.bench.report import svg

NUM_COLOURS = 10
BASE = "base"  # the colour of plain decoding
SHORT = 12  # characters of a label that fits beside a small plot
WIDE = 22  # characters of a line of a label beside a large plot
_DASHES = (None, "6 3", "2 3")
_MARKERS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0Z",
    "M-3.5 -3.5h7v7h-7Z",
    "M0 -4.6L4.4 3.4H-4.4Z",
    "M0 -5L5 0L0 5L-5 0Z",
    "M0 4.6L4.4 -3.4H-4.4Z",
)


@dataclass(frozen=True, slots=True)
class Mark:
    """How a method looks in every plot of a page."""

    place: int  # from 0: colour, marker, dashes
    label: str
    key: str  # what stands for it where there is little room: its label, or its number
    is_base: bool = False

    @property
    def colour(self) -> str:
        again = " again" if self.place >= NUM_COLOURS else ""  # the colours come round: lighter bars with an edge
        return f"c-{BASE}" if self.is_base else f"c-{self.place % NUM_COLOURS}{again}"

    @property
    def dashes(self) -> str | None:
        return _DASHES[self.place // NUM_COLOURS % len(_DASHES)]

    @property
    def marker(self) -> str:
        return _MARKERS[self.place % len(_MARKERS)]


def marks(labels: Sequence[str], baseline: str | None) -> dict[str, Mark]:
    """A look for each method; numbers stand for labels where one of them is long."""
    numbered = any(len(label) > SHORT for label in labels)
    found: dict[str, Mark] = {}
    others = 0
    for place, label in enumerate(labels):
        base = label == baseline
        found[label] = Mark(others, label, str(place + 1) if numbered else label, base)
        others += not base
    return found


def names(mark: Mark, wide: bool) -> list[str]:
    if not wide:
        return [mark.key]
    rows = svg.wrap(mark.label, WIDE)
    return rows if mark.key == mark.label else [f"{mark.key} {rows[0]}", *rows[1:]]


def margin(names: Sequence[Sequence[str]]) -> float:
    return 12 + max((len(row) for rows in names for row in rows), default=0) * svg.CHARACTER


def beside(mark: Mark, rows: Sequence[str], middle: float) -> str:
    return svg.group(
        svg.tooltip(mark.label), svg.label(rows, -8, middle, text_anchor="end", class_="name"), **look(mark)
    )


def look(mark: Mark) -> dict[str, str]:
    return {"class_": f"m {mark.colour}", "data_m": mark.label}
