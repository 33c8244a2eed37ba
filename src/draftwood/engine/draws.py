"""Sampled tokens of many requests, drawn at once: by the target itself, if it can, or from its logits on a GPU.

A request can take part if the token after a node is one draw from the target's distribution there. With penalties that
distribution depends on the path to the node, as with a structure that the output must match, and drawn children are
accepted by another rule: such requests read their rows themselves.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from draftwood.engine.session import Session
from draftwood.sampling import Warper, draw_tokens
from draftwood.targets import Draw, ForwardOutput, Segment
from draftwood.verify import upcoming_numbers

MAX_LOGITS = 2**27  # whose distributions are held at once


class Rows(NamedTuple):
    """The rows of logits of one session."""

    member: int  # index of the session
    first: int
    numbers: Sequence[float]  # random numbers, one per row

    @property
    def end(self) -> int:
        return self.first + len(self.numbers)


def plan_draw(session: Session) -> Draw | None:
    """How the target should draw the tokens after the nodes of the tree of a session that draws ahead; None: not at
    all."""
    if session.tree.proposals:
        return None
    return Draw(session.warper.rule, partial(upcoming_numbers, session.tree, session.randomness))


def take_drawn(
    output: ForwardOutput, sessions: Sequence[Session], segments: Sequence[Segment]
) -> list[list[int] | None]:
    """The token after every node of each session's tree; None: not drawn.

    What the target has not drawn is drawn from its logits if they are on a GPU. On a CPU acceptance computes only the
    rows that it reaches.
    """
    if output.drawn is not None:
        tokens, ends = output.drawn.tolist(), accumulate([segment.num_logits for segment in segments])
        return [
            None if segment.draw is None else tokens[end - segment.num_logits : end]
            for segment, end in zip(segments, ends, strict=True)
        ]
    if output.logits.is_cuda:
        return _draw_from(output.logits, sessions, [segment.num_logits for segment in segments])
    return [None] * len(sessions)


def _draw_from(logits: torch.Tensor, sessions: Sequence[Session], num_rows: Sequence[int]) -> list[list[int] | None]:
    drawn: list[list[int] | None] = [None] * len(sessions)
    groups: dict[tuple[float, ...], list[Rows]] = defaultdict(list)  # by sampling rule
    warpers: dict[tuple[float, ...], Warper] = {}
    first = 0
    for index, (session, size) in enumerate(zip(sessions, num_rows, strict=True)):
        if session.may_draw_ahead and not (session.is_prefilling or session.tree.proposals):
            warper = session.warper
            warpers[warper.rule] = warper
            groups[warper.rule].append(Rows(index, first, upcoming_numbers(session.tree, session.randomness)))
        first += size
    for rule, members in groups.items():
        for some in _batches(members, max(1, MAX_LOGITS // logits.shape[-1])):
            numbers = [number for rows in some for number in rows.numbers]
            tokens = draw_tokens(warpers[rule].probs(_gather(logits, some)), numbers)
            taken = 0
            for rows in some:
                drawn[rows.member] = tokens[taken : taken + len(rows.numbers)]
                taken += len(rows.numbers)
    return drawn


def _gather(logits: torch.Tensor, some: Sequence[Rows]) -> torch.Tensor:
    if all(after.first == before.end for before, after in pairwise(some)):
        return logits[some[0].first : some[-1].end]
    index = [row for rows in some for row in range(rows.first, rows.end)]
    return logits[torch.tensor(index, device=logits.device)]


def _batches(members: Sequence[Rows], max_rows: int) -> Iterator[list[Rows]]:
    """Groups of at most ``max_rows`` rows; a larger tree goes alone."""
    group: list[Rows] = []
    size = 0
    for rows in members:
        if group and size + len(rows.numbers) > max_rows:
            yield group
            group, size = [], 0
        group.append(rows)
        size += len(rows.numbers)
    if group:
        yield group
