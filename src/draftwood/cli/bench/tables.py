"""Tables and paragraphs that fit a terminal. In a file or a pipe a row stays one line, however long it is."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence

from draftwood.cli.console import Paint, Screen, columns, table

GAP = 2  # between columns
LEAST = 16  # of a column whose text is broken

Row = tuple[str, ...]
Wrap = Callable[[str, int], list[str]]


def figures_table(paint: Paint, rows: Sequence[Row]) -> list[str]:
    """Figures behind names that may be long. Columns that do not fit go into a second table below the first."""
    from draftwood.plots import wrap_label

    room = _room(paint)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if room is None or _total(widths) <= room:
        return table(paint, rows)
    spare = room - _total(widths[1:]) - GAP
    name = min(widths[0], spare if spare >= LEAST else max(LEAST, room // 2))
    blocks = []
    for chosen in _blocks(widths, name, room):
        short = [(row[0], *(row[at] for at in chosen)) for row in rows]
        blocks.append("\n".join(table(paint, list(_broken(short, 0, name, wrap_label)))))
    return "\n\n".join(blocks).split("\n")


def prose_table(paint: Paint, rows: Sequence[Row]) -> list[str]:
    """Rows whose last column is a text."""
    room = _room(paint)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if room is None or _total(widths) <= room:
        return table(paint, rows)
    last = len(widths) - 1
    return table(paint, list(_broken(rows, last, max(LEAST, room - _total(widths[:-1]) - GAP), textwrap.wrap)))


def tell(screen: Screen, text: str, indent: str = "") -> None:
    """A note beside the answer, in lines that fit; a progress bar makes room for it."""
    room = _room(screen.err)
    lines = text.split("\n")
    if room is not None:
        lines = [part for line in lines for part in textwrap.wrap(line, room - len(indent), break_on_hyphens=False)]
    screen.progress.clear()
    screen.note("\n".join(indent + line for line in lines))


def _room(paint: Paint) -> int | None:
    return columns() if paint.is_terminal else None


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _blocks(widths: Sequence[int], name: int, room: int) -> list[list[int]]:
    """The columns behind the name, as many to a block as there is room for."""
    blocks: list[list[int]] = [[]]
    for at in range(1, len(widths)):
        if blocks[-1] and _total([name, *(widths[other] for other in blocks[-1]), widths[at]]) > room:
            blocks.append([])
        blocks[-1].append(at)
    return blocks


def _broken(rows: Sequence[Row], at: int, width: int, wrap: Wrap) -> Iterator[Row]:
    """The rows with the text of one column over several lines."""
    for row in rows:
        for number, piece in enumerate(wrap(row[at], width) or [""]):
            rest = row if number == 0 else ("",) * len(row)
            yield (*rest[:at], piece, *rest[at + 1 :])
