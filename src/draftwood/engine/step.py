"""One cycle of the engine. Read this file first.

Every running request contributes a segment: its drafter's tree, or a part of its prompt. The target checks all of them
in one forward pass. Each request then keeps the longest path that the target agrees with, up to a stop condition; the
accepted nodes stay in the cache, the others are dropped, and the drafter learns from the target's answer.
Plain decoding is the same cycle with trees that are only their roots.
"""

from collections.abc import Sequence

from draftwood.drafters import PromptRows
from draftwood.engine.accepting import accept, emit, event_of, learn
from draftwood.engine.drafting import draft
from draftwood.engine.events import TokenEvent
from draftwood.engine.fitting import fit_trees
from draftwood.engine.passes import Answer, Pass, collect, launch
from draftwood.engine.session import Session
from draftwood.engine.timing import charge_accepting
from draftwood.targets import Segment, Target

MAX_PREFILL_ROWS = 8192  # prompt positions of one pass, about: its memory grows with them


def step(target: Target, sessions: Sequence[Session]) -> list[TokenEvent]:
    """Runs one cycle. A session that fails is marked (``session.error``) and does not disturb the others."""
    launched = begin(target, sessions)
    return [] if launched is None else finish(target, launched)


def begin(target: Target, sessions: Sequence[Session], lane: int = 0) -> Pass | None:
    """The first half of a cycle: draft, size, and launch the pass that verifies. None: nothing to run."""
    sessions = select_sessions(sessions)
    drafts = draft(sessions)
    fit_trees(sessions, drafts)
    running = [session for session in sessions if session.error is None]
    return launch(target, running, lane) if running else None


def finish(target: Target, launched: Pass) -> list[TokenEvent]:
    """The second half: accept, emit, commit and learn."""
    events = []
    for session, segment, answer in collect(launched):
        if session.finish_reason is not None:  # cancelled while the pass ran
            continue
        if session.is_prefilling:
            read_prompt(session, target, segment, answer)
        elif (event := advance(session, target, answer)) is not None:
            events.append(event)
    return events


@charge_accepting
def advance(session: Session, target: Target, answer: Answer) -> TokenEvent | None:
    """Takes one verified tree into the output. None if that failed."""
    with session:
        accepted = accept(session, answer)
        block = emit(session, accepted)
        learn(session, accepted, block, answer)
        event = event_of(session, accepted, block, answer)
        # All tokens but the last are committed: the root and the accepted nodes before it.
        target.keep(session.sequence, accepted.path[: len(block.token_ids)])
        return event
    return None


def read_prompt(session: Session, target: Target, segment: Segment, answer: Answer) -> None:
    """Commits a part of the prompt and shows it to the drafter if it asked for that."""
    target.keep(session.sequence, range(len(segment.token_ids)))
    start, output = session.num_committed, answer.output
    session.num_committed += len(segment.token_ids)
    if segment.num_logits or session.drafter.wants_taps:
        with session:
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
