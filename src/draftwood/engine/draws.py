"""What sampled requests draw in a cycle, for all of them at once: a few launches, and tokens alone travel to the host.

A request can take part where the token after a node is one draw from what the target says there. With penalties that
depends on the path to the node, and drawn children are accepted by another rule: such requests look at rows themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from draftwood.engine.session import Session
from draftwood.sampling import Warper, draw_tokens

MOST_LOGITS = 2**27  # whose distributions are held at once


class Rows(NamedTuple):
    """The rows of logits of one request."""

    place: int  # of the request
    first: int
    numbers: Sequence[float]  # one a row

    @property
    def end(self) -> int:
        return self.first + len(self.numbers)


def draw_together(logits: torch.Tensor, running: Sequence[tuple[Session, int]]) -> list[list[int] | None]:
    """Of each request, with its number of rows of ``logits [N, V]``, the token after every node of its tree; None if
    it has to look itself. On a CPU all do: what is not asked for is not computed there."""
    found: list[list[int] | None] = [None] * len(running)
    if not logits.is_cuda:
        return found
    alike: dict[tuple[float, ...], list[Rows]] = defaultdict(list)
    warpers: dict[tuple[float, ...], Warper] = {}
    first = 0
    for place, (session, num_rows) in enumerate(running):
        if session.draws_at_once:
            warper = session.warper
            warpers[warper.rule] = warper
            alike[warper.rule].append(Rows(place, first, session.numbers()))
        first += num_rows
    for rule, members in alike.items():
        for some in _within(members, max(1, MOST_LOGITS // logits.shape[-1])):
            numbers = [number for rows in some for number in rows.numbers]
            tokens = draw_tokens(warpers[rule].probs(_gathered(logits, some)), numbers)
            taken = 0
            for rows in some:
                found[rows.place] = tokens[taken : taken + len(rows.numbers)]
                taken += len(rows.numbers)
    return found


def _gathered(logits: torch.Tensor, some: Sequence[Rows]) -> torch.Tensor:
    if all(after.first == before.end for before, after in pairwise(some)):
        return logits[some[0].first : some[-1].end]
    index = [row for rows in some for row in range(rows.first, rows.end)]
    return logits[torch.tensor(index, device=logits.device)]


def _within(members: Sequence[Rows], most: int) -> Iterator[list[Rows]]:
    """Groups of at most so many rows; a larger tree goes alone."""
    group: list[Rows] = []
    size = 0
    for rows in members:
        if group and size + len(rows.numbers) > most:
            yield group
            group, size = [], 0
        group.append(rows)
        size += len(rows.numbers)
    if group:
        yield group
