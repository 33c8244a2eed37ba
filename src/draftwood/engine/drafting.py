"""The drafts of a cycle: one request after the other, or all at once where a drafter runs a model of its own."""

from __future__ import annotations

import time
from collections.abc import Sequence

from draftwood.drafters import Drafter
from draftwood.engine.session import Drafted, Session
from draftwood.tree import DraftTree


def draft(sessions: Sequence[Session]) -> list[Drafted | None]:
    """For every session its drafter's tree, or why there is none; None for those that have a prompt to read first."""
    drafts: list[Drafted | None] = [None] * len(sessions)
    groups: dict[object, list[int]] = {}  # places of the sessions whose drafts are made together
    for place, session in enumerate(sessions):
        if session.wants_tree:
            drafter = session.drafter
            if drafter.drafts_in_batch:
                groups.setdefault((type(drafter), id(drafter.shared)), []).append(place)
            else:
                drafts[place] = _alone(drafter, session.wanted_nodes)
    for places in groups.values():
        for place, made in zip(places, _together([sessions[place] for place in places]), strict=True):
            drafts[place] = made
    return drafts


def _alone(drafter: Drafter, budget: int) -> Drafted:
    started = time.perf_counter()
    tree: DraftTree | Exception
    try:
        tree = drafter.propose(budget)
    except Exception as error:  # noqa: BLE001 - a drafter is anybody's code; its request alone ends
        tree = error
    return Drafted(tree, budget, time.perf_counter() - started)


def _together(sessions: Sequence[Session]) -> list[Drafted]:
    """Everybody pays for an equal part of the time, and shares the error if there is one."""
    budgets = [session.wanted_nodes for session in sessions]
    started = time.perf_counter()
    drafters = [session.drafter for session in sessions]
    trees: Sequence[DraftTree | Exception]
    try:
        trees = type(drafters[0]).propose_batch(drafters, budgets)
    except Exception as error:  # noqa: BLE001 - as above
        trees = [error] * len(drafters)
    seconds = (time.perf_counter() - started) / len(drafters)
    return [Drafted(tree, budget, seconds) for tree, budget in zip(trees, budgets, strict=True)]
