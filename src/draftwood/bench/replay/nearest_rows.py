"""What the target might have said at a context that no run visited: what it said at the nearest one that ends alike.

Nearest is the row of the same last two tokens, else of the same last token, whose place is the fewest positions away.
Rows of the text itself count up to the root only: later ones would tell the drafter what comes. Rows beside the text
count wherever they are, since the text never went there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from draftwood.bench.replay.recording import RecordedRequest
from draftwood.bench.replay.rows import ON_TEXT

ANY = -1  # instead of the token before the last
AFTER_ALL = 1 << 62

Place = tuple[int, int]  # position in the text, row


class _Rows(NamedTuple):
    on_text: list[Place]
    off_text: list[Place]


class NearestRows:
    """The rows of one request by the tokens they end with."""

    def __init__(self, request: RecordedRequest) -> None:
        arrays, text = request.rows.arrays(), request.text
        self._rows: dict[tuple[int, int], _Rows] = {}
        positions: list[int] = []  # [R] where the context is on the text, or left it
        tokens: list[int] = []  # [R] its last token
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
        """The row to take for a context that ends with these two tokens, in a tree whose root is at ``root``."""
        for key in ((previous, token), (ANY, token)):
            rows = self._rows.get(key)
            if rows is not None:
                found = [*_around(rows.on_text, root)[:1], *_around(rows.off_text, root)]
                known = [place for place in found if place is not None]
                if known:
                    return min(known, key=lambda place: abs(place[0] - root))[1]
        return None


def _around(places: Sequence[Place], position: int) -> tuple[Place | None, Place | None]:
    """The last place up to ``position``, and the first behind it."""
    index = bisect_right(places, (position, AFTER_ALL))
    return places[index - 1] if index else None, places[index] if index < len(places) else None
