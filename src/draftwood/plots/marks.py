"""How a data series looks in every plot of a page: colour, marker, dashes and label."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftwood.plots import svg

NUM_COLOURS = 10
SHORT = 12  # characters: longer labels do not fit beside a small plot
WIDE = 22  # characters in a line of a label beside a large plot
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
    """How a data series looks in every plot of a page."""

    index: int  # selects colour, marker and dashes
    label: str
    key: str  # shown where space is short: the label, or a number
    is_base: bool = False

    @property
    def colour(self) -> str:
        again = " again" if self.index >= NUM_COLOURS else ""  # colours repeat as lighter bars with an outline
        return "c-base" if self.is_base else f"c-{self.index % NUM_COLOURS}{again}"

    @property
    def dashes(self) -> str | None:
        return _DASHES[self.index // NUM_COLOURS % len(_DASHES)]

    @property
    def marker(self) -> str:
        return _MARKERS[self.index % len(_MARKERS)]

    @property
    def attributes(self) -> dict[str, str]:
        """Attributes of the group of elements that show this series."""
        return {"class_": f"m {self.colour}", "data_m": self.label}

    def wrap(self, wide: bool) -> list[str]:
        """Return the lines that name the series: its key, or its whole label if the plot is wide."""
        if not wide:
            return [self.key]
        rows = svg.wrap_label(self.label, WIDE)
        return rows if self.key == self.label else [f"{self.key} {rows[0]}", *rows[1:]]


def assign_marks(labels: Sequence[str], baseline: str | None = None, *, has_legend: bool = True) -> dict[str, Mark]:
    """Assign a mark to each label. With a legend, numbers are the keys of all if any label is long."""
    numbered = has_legend and any(len(label) > SHORT for label in labels)
    marks: dict[str, Mark] = {}
    num_others = 0
    for number, label in enumerate(labels, 1):
        is_base = label == baseline
        marks[label] = Mark(num_others, label, str(number) if numbered else label, is_base)
        num_others += not is_base
    return marks
