"""Tables and paragraphs that fit the terminal. In a file or pipe every row is one line."""

import textwrap
from collections.abc import Callable, Iterator, Sequence

from draftwood.cli.console import Paint, Screen, columns, table
from draftwood.plots import wrap_label

GAP = 2  # between columns
MIN_WIDTH = 16  # of a wrapped column

Row = tuple[str, ...]
Wrap = Callable[[str, int], list[str]]


def figures_table(paint: Paint, rows: Sequence[Row]) -> list[str]:
    """Format figures after long names. Columns that do not fit go into another table below."""

    room = _max_width(paint)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if room is None or _total_width(widths) <= room:
        return table(paint, rows)
    spare = room - _total_width(widths[1:]) - GAP
    name = min(widths[0], spare if spare >= MIN_WIDTH else max(MIN_WIDTH, room // 2))
    blocks = []
    for chosen in _split_columns(widths, name, room):
        short = [(row[0], *(row[at] for at in chosen)) for row in rows]
        blocks.append("\n".join(table(paint, list(_wrap_rows(short, 0, name, wrap_label)))))
    return "\n\n".join(blocks).split("\n")


def prose_table(paint: Paint, rows: Sequence[Row]) -> list[str]:
    """Format rows whose last column is prose."""
    room = _max_width(paint)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if room is None or _total_width(widths) <= room:
        return table(paint, rows)
    last = len(widths) - 1
    return table(
        paint, list(_wrap_rows(rows, last, max(MIN_WIDTH, room - _total_width(widths[:-1]) - GAP), textwrap.wrap))
    )


def print_note(screen: Screen, text: str, indent: str = "") -> None:
    """Print a wrapped note to stderr; clears the progress bar."""
    room = _max_width(screen.err)
    lines = text.split("\n")
    if room is not None:
        lines = [part for line in lines for part in textwrap.wrap(line, room - len(indent), break_on_hyphens=False)]
    screen.progress.clear()
    screen.note("\n".join(indent + line for line in lines))


def _max_width(paint: Paint) -> int | None:
    return columns() if paint.is_terminal else None


def _total_width(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _split_columns(widths: Sequence[int], name: int, room: int) -> list[list[int]]:
    """Split the columns after the name into blocks that fit."""
    blocks: list[list[int]] = [[]]
    for at in range(1, len(widths)):
        if blocks[-1] and _total_width([name, *(widths[other] for other in blocks[-1]), widths[at]]) > room:
            blocks.append([])
        blocks[-1].append(at)
    return blocks


def _wrap_rows(rows: Sequence[Row], at: int, width: int, wrap: Wrap) -> Iterator[Row]:
    """Wrap one column of the rows."""
    for row in rows:
        for number, piece in enumerate(wrap(row[at], width) or [""]):
            rest = row if number == 0 else ("",) * len(row)
            yield (*rest[:at], piece, *rest[at + 1 :])
