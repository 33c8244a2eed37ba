"""The drafts of a cycle: one request after the other, or all at once where a drafter runs a model of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from draftwood.engine.session import Drafted, Session
from draftwood.tree import DraftTree


class _Group(NamedTuple):
    """Requests whose drafts are made together."""

    sessions: list[Session]
    budgets: list[int]


def draft(sessions: Sequence[Session]) -> list[Drafted | None]:
    """For every session its drafter's tree, or why there is none; None for those that have a prompt to read first."""
    groups: dict[object, _Group] = {}
    for session in sessions:
        if session.wants_tree:
            drafter = session.drafter
            key = (type(drafter), id(drafter.shared)) if drafter.drafts_together else id(session)
            group = groups.setdefault(key, _Group([], []))
            group.sessions.append(session)
            group.budgets.append(session.wanted_nodes)
    found = {id(session): made for group in groups.values() for session, made in _drafted(group)}
    return [found.get(id(session)) for session in sessions]


def _drafted(group: _Group) -> list[tuple[Session, Drafted]]:
    """Everybody pays for an equal part of the time, and shares the error if there is one."""
    started = time.perf_counter()
    drafters = [session.drafter for session in group.sessions]
    trees: Sequence[DraftTree | Exception]
    try:
        trees = type(drafters[0]).propose_together(drafters, group.budgets)
    except Exception as error:  # noqa: BLE001 - a drafter is anybody's code; its requests alone end
        trees = [error] * len(drafters)
    seconds = (time.perf_counter() - started) / len(drafters)
    made = [Drafted(tree, budget, seconds) for tree, budget in zip(trees, group.budgets, strict=True)]
    return list(zip(group.sessions, made, strict=True))
