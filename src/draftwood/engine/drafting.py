"""The drafts of a cycle: one request after another, or all at once where a drafter runs a model of its own."""

import time
from collections.abc import Sequence
from typing import NamedTuple

from draftwood.drafters import Drafter
from draftwood.engine.session import Session
from draftwood.tree import DraftTree


class Draft(NamedTuple):
    """What a drafter proposed for one session."""

    tree: DraftTree | Exception
    budget: int  # nodes that were allowed
    seconds: float


def draft(sessions: Sequence[Session]) -> list[Draft | None]:
    """The draft of every session; None for those that are still reading their prompt."""
    drafts: list[Draft | None] = [None] * len(sessions)
    groups: dict[object, list[int]] = {}  # sessions whose drafts are made together, by index
    for index, session in enumerate(sessions):
        if session.error is None and not session.is_prefilling:
            drafter = session.drafter
            if drafter.drafts_in_batch:
                groups.setdefault((type(drafter), id(drafter.shared)), []).append(index)
            else:
                drafts[index] = _draft_one(drafter, _num_wanted(session))
    for indices in groups.values():
        for index, made in zip(indices, _draft_group([sessions[index] for index in indices]), strict=True):
            drafts[index] = made
    return drafts


def _num_wanted(session: Session) -> int:
    """How many nodes the drafter may propose. Before the last token guesses are of no use."""
    budget = session.sample.budget
    if budget == 1 or session.num_left <= 1:
        return 1
    return budget if session.sizer is None else min(budget, session.sizer.wanted)


def _draft_one(drafter: Drafter, budget: int) -> Draft:
    started = time.perf_counter()
    tree: DraftTree | Exception
    try:
        tree = drafter.propose(budget)
    except Exception as error:  # noqa: BLE001 - drafters may be third-party code; only their request ends
        tree = error
    return Draft(tree, budget, time.perf_counter() - started)


def _draft_group(sessions: Sequence[Session]) -> list[Draft]:
    """Each session is charged an equal part of the time, and shares the error if there is one."""
    budgets = [_num_wanted(session) for session in sessions]
    drafters = [session.drafter for session in sessions]
    started = time.perf_counter()
    trees: Sequence[DraftTree | Exception]
    try:
        trees = type(drafters[0]).propose_batch(drafters, budgets)
    except Exception as error:  # noqa: BLE001 - as above
        trees = [error] * len(drafters)
    seconds = (time.perf_counter() - started) / len(drafters)
    return [Draft(tree, budget, seconds) for tree, budget in zip(trees, budgets, strict=True)]
