"""One cycle of the engine. Read this file first.

Every running request contributes a segment: its drafter's tree, or a part of its prompt. The target checks all of them
in one forward pass. Each request then keeps the longest path that the target agrees with, up to a stop condition; the
accepted nodes stay in the cache, the others are dropped, and the drafter learns from the target's answer.
Plain decoding is the same cycle with trees that are only their roots.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from draftwood.drafters import PromptRows
from draftwood.engine.accepting import Accepted, accept_trees, commit, learn, note_trees, write
from draftwood.engine.drafting import draft, draft_ahead
from draftwood.engine.events import TokenEvent
from draftwood.engine.fitting import fit_trees
from draftwood.engine.passes import Answer, Pass, collect, launch
from draftwood.engine.session import Session
from draftwood.engine.timing import Spent, charge, note_costs
from draftwood.targets import Target

MAX_PREFILL_ROWS = 8192  # prompt positions of one pass, about: its memory grows with them


class Finished(NamedTuple):
    """A cycle whose tokens are not written out yet."""

    accepted: Sequence[Accepted]
    drafted: Sequence[Accepted]  # those whose drafters made the trees; the sizers have not noted what came of them
    answer: Answer
    at: float  # when it was finished, by the clock of ``time.perf_counter``
    spent: Spent  # on which sessions, not charged to them yet


def begin(
    target: Target,
    sessions: Sequence[Session],
    lane: int = 0,
    *,
    drafts: bool = True,
    is_trial: bool = False,
    is_watched: bool = False,
    before_launch: Callable[[], None] = lambda: None,
) -> Pass | None:
    """The first half of a cycle: draft, size, and launch the pass that verifies. None: nothing to run.

    A session that fails is marked (``session.error``) and does not disturb the others. ``drafts``: see engine/ways.py;
    ``is_trial``: it may soon change again; ``is_watched``: drafts are tried with and without.
    """
    started = time.perf_counter()
    sessions = select_sessions(sessions)
    drafted = draft(sessions, drafts=drafts, is_trial=is_trial, is_watched=is_watched)
    num_read = sum([session.num_unread for session in sessions if session.is_prefilling])
    fitted = fit_trees(drafted, num_read, target.ready_sizes(len(sessions)))
    running = [session for session in sessions if session.error is None]
    if not running:
        return None
    before_launch()
    launched = launch(target, running, fitted, lane)
    launched.times.drafting = time.perf_counter() - started - launched.times.passing
    show_prompts(running)
    draft_ahead(launched)
    return launched


def finish(target: Target, launched: Pass) -> Finished:
    """The second half: accept, learn and commit. The next cycle may begin then."""
    spent = launched.spent
    answer = collect(launched)
    started = time.perf_counter()
    accepted = accept_trees(answer)
    drafted = learn(accepted, answer)
    commit(target, accepted)
    if spent.num_read:
        read_prompts(target, answer)
    now = time.perf_counter()
    spent.times.accepting = now - started
    return Finished(accepted, drafted, answer, now, spent)


def write_out(finished: Finished) -> list[TokenEvent]:
    """Costs, chances, text, statistics and events of a finished cycle. The next one may begin without them."""
    charge(finished.spent)
    note_costs(finished.spent)
    note_trees(finished.drafted)
    return write(finished.accepted, finished.answer, finished.at)


def show_prompts(sessions: Sequence[Session]) -> None:
    """Shows drafters their prompts while the target reads them."""
    for session in sessions:
        if session.is_prefilling and not session.is_resting:
            session.begin_drafting()


def read_prompts(target: Target, answer: Answer) -> None:
    """Commits parts of prompts and shows them to the drafters that ask for that."""
    for index, (session, segment) in enumerate(zip(answer.sessions, answer.segments, strict=True)):
        if session.finish_reason is not None or not session.is_prefilling:
            continue
        target.keep(session.sequence, range(len(segment.token_ids)))
        start = session.num_committed
        session.note_read(len(segment.token_ids))
        if segment.num_logits or (session.drafter.wants_taps and not session.is_resting):
            with session:
                output = answer.only_part(index)
                session.drafter.read_prompt(PromptRows(start, output.logits, output.top, output.taps))


def select_sessions(sessions: Sequence[Session]) -> Sequence[Session]:
    """Limits the prompts of one pass: its memory stays bounded, and running requests do not wait for all of them."""
    room, selected = MAX_PREFILL_ROWS, []
    for session in sessions:
        if session.is_prefilling:
            if room <= 0:
                continue
            room -= session.num_unread
        selected.append(session)
    return selected
