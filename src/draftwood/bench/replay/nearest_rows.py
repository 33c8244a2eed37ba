"""Estimates the target's row at a context that no run visited: the row of the nearest similar context.

Similar means the same last two tokens, else the same last token; nearest is by position. Rows on the text are used only
up to the root, since later ones would reveal the text. Rows off the text are used everywhere.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from draftwood.bench.replay.recording import RecordedRequest
from draftwood.bench.replay.rows import ON_TEXT

ANY = -1  # instead of the second to last token
AFTER_ALL = 1 << 62

Place = tuple[int, int]  # position in the text, row


class _Rows(NamedTuple):
    on_text: list[Place]
    off_text: list[Place]


class NearestRows:
    """The rows of one request by their last tokens."""

    def __init__(self, request: RecordedRequest) -> None:
        arrays, text = request.rows.arrays(), request.text
        self._rows: dict[tuple[int, int], _Rows] = {}
        positions: list[int] = []  # [R] position of the context, or where it left the text
        tokens: list[int] = []  # [R] last token
        for row, (parent, label) in enumerate(zip(arrays.parents.tolist(), arrays.labels.tolist(), strict=True)):
            on_text = parent == ON_TEXT
            positions.append(label if on_text else positions[parent])
            tokens.append(text[label] if on_text else label)
            previous = text[max(label - 1, 0)] if on_text else tokens[parent]
            for key in ((previous, tokens[row]), (ANY, tokens[row])):
                rows = self._rows.setdefault(key, _Rows([], []))
                (rows.on_text if on_text else rows.off_text).append((positions[row], row))
        for rows in self._rows.values():
            rows.on_text.sort()
            rows.off_text.sort()

    def nearest(self, previous: int, token: int, root: int) -> int | None:
        """Find the row for a context that ends with these two tokens, in a tree with its root at ``root``."""
        for key in ((previous, token), (ANY, token)):
            rows = self._rows.get(key)
            if rows is not None:
                found = [*_find_neighbours(rows.on_text, root)[:1], *_find_neighbours(rows.off_text, root)]
                known = [place for place in found if place is not None]
                if known:
                    return min(known, key=lambda place: abs(place[0] - root))[1]
        return None


def _find_neighbours(places: Sequence[Place], position: int) -> tuple[Place | None, Place | None]:
    """Return the last place up to ``position``, and the first after it."""
    index = bisect_right(places, (position, AFTER_ALL))
    return places[index - 1] if index else None, places[index] if index < len(places) else None
