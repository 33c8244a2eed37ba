"""The drafts of a cycle: one request after another, or all at once where a drafter works for a batch."""

import time
from collections.abc import Sequence

from draftwood.engine.passes import Pass
from draftwood.engine.session import Session
from draftwood.tree import DraftTree


def draft(
    sessions: Sequence[Session], *, drafts: bool = True, is_trial: bool = False, is_watched: bool = False
) -> list[Session]:
    """Lets the drafter of every session propose a tree (``session.offered``). A drafter that fails ends its session.

    Returns the sessions that have one: not those that are still reading their prompt. ``drafts``: False lets all
    drafters rest that may. Those that cannot come back leave; if it is only a trial, they go on reading and propose
    nothing. ``is_watched``: the batch as a whole tries whether drafts pay. Then a request whose head runs for others
    too does not pause by itself, which would save nothing.
    """
    drafting = list[Session]()
    groups: dict[object, list[Session]] = {}  # whose drafts are made together
    for session in sessions:
        drafter, sizer = session.drafter, session.sizer
        is_out = not drafts and session.may_rest
        waits = is_out and is_trial and drafter.can_leave and not session.has_left
        if is_out and drafter.can_leave and not waits:
            session.leave()
        if session.is_prefilling:  # logits and hidden states of prompts cost something too
            session.is_resting = session.has_left or (is_out and not waits)
            if drafter.wants_taps and not session.is_resting:
                session.begin_drafting()  # before the pass: it may find that it does not want them
            continue
        if session.error is not None:
            continue
        drafting.append(session)
        if session.has_left or (
            session.can_rest and (not session.drafts or (sizer is not None and (is_out or sizer.is_pausing)))
        ):
            session.rest()
            continue
        if (session.is_resting or session.num_skipped or not session.has_begun) and not session.wake():
            continue
        session.num_wanted = 1 if waits else _count_wanted(session)
        if session.is_calibrated and sizer is not None:
            drafter.min_chance = sizer.min_chance
        if session.draft_group is None:
            _draft_one(session)
        else:
            groups.setdefault(session.draft_group, []).append(session)
    for group in groups.values():
        if drafts and is_watched and len(group) > 1 and group[0].drafter.can_leave:
            for session in group:
                session.num_wanted = _count_wanted(session, pauses=False)
        _draft_group(group)
    return [session for session in drafting if session.error is None]


def draft_ahead(launched: Pass) -> None:
    """Lets the drafter of a single request queue its next draft on the device, right after the pass that runs there, so
    that it does not wait for the host."""
    if len(launched.sessions) > 1:
        return
    (session,) = launched.sessions
    drafter = session.drafter
    if not drafter.drafts_ahead or session.is_prefilling or session.is_resting or session.num_wanted == 1:
        return
    # The device knows neither penalties nor structures.
    if not (session.takes_choices or session.draws_ahead) or tuple(launched.taps) != drafter.wants_taps:
        return
    answer = launched.flight.on_device()
    if answer is not None:
        with session:
            drafter.draft_ahead(answer, session.num_wanted)


def _count_wanted(session: Session, *, pauses: bool = True) -> int:
    """How many nodes the drafter may propose. Before the last token guesses are of no use."""
    budget, sizer = session.budget, session.sizer
    if budget == 1 or session.max_length - len(session.tokens) <= 1:
        return 1
    if sizer is None:
        return budget
    return min(budget, sizer.wanted if pauses else sizer.wanted_awake)


def _draft_one(session: Session) -> None:
    started = time.perf_counter()
    try:
        session.offered = session.drafter.propose(session.num_wanted)
    except Exception as error:  # noqa: BLE001 - drafters may be third-party code; only their request ends
        session.fail(error)
    session.draft_seconds = time.perf_counter() - started


def _draft_group(group: Sequence[Session]) -> None:
    """Each session is charged an equal part of the time, and shares the error if there is one."""
    drafters = [session.drafter for session in group]
    started = time.perf_counter()
    try:
        trees: Sequence[DraftTree] = type(drafters[0]).propose_batch(drafters, [each.num_wanted for each in group])
    except Exception as error:  # noqa: BLE001 - as above
        for session in group:
            session.fail(error)
        return
    seconds = (time.perf_counter() - started) / len(drafters)
    for session, tree in zip(group, trees, strict=True):
        session.offered, session.draft_seconds = tree, seconds
