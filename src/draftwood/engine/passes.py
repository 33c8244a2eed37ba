"""One forward pass for many sessions: what each contributes, and what each gets back."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from draftwood.engine.draws import draw_sampled
from draftwood.engine.session import Session
from draftwood.engine.timing import charge_pass, charge_rows, note_cost
from draftwood.targets import ForwardOutput, PendingPass, Segment, Target, chain_parents


class Pass(NamedTuple):
    """A pass that was launched and whose answer has not been read yet."""

    sessions: Sequence[Session]
    segments: Sequence[Segment]
    flight: PendingPass
    taps: Sequence[int]  # layers whose hidden states come with it
    seconds: float  # of the launch


class Answer(NamedTuple):
    """What the target says about one session's segment."""

    output: ForwardOutput  # its rows; empty if the session reads none
    choices: Sequence[int]  # greedy token after each node
    drawn: Sequence[int] | None  # sampled token after each node, if it was drawn for many sessions at once


def segment_of(session: Session) -> Segment:
    """The next part of the session's prompt, or its tree."""
    if not session.is_prefilling:
        tree = session.tree
        return Segment(session.sequence, tree.tokens, tree.parents, len(tree.tokens))
    start = session.num_committed
    part = session.tokens[start : start + session.num_unread]
    is_new = session.num_read == session.num_prompt  # drafters have seen what is read again
    reads_prompt = (
        is_new and session.drafter.wants_prompt_logits and (session.sizer is None or session.sizer.reads_prompts)
    )
    return Segment(session.sequence, part, chain_parents(len(part)), len(part) if reads_prompt else 0)


def launch(target: Target, sessions: Sequence[Session], lane: int) -> Pass:
    segments = [segment_of(session) for session in sessions]
    drafters = [session.drafter for session in sessions]
    target.set_top(max([drafter.wants_top for drafter in drafters]))
    taps = sorted(set().union(*[drafter.wants_taps for drafter in drafters if drafter.wants_taps]))
    target.set_taps(taps)
    with charge_pass(sessions, segments) as clock:
        flight = target.launch(segments, lane)
    return Pass(sessions, segments, flight, taps, clock.seconds)


def collect(launched: Pass) -> Iterator[tuple[Session, Segment, Answer]]:
    """Waits for the pass; then each session with its part of the answer."""
    sessions, segments, flight, taps, launch_seconds = launched
    with charge_pass(sessions, segments) as clock:
        output = flight.wait()
        choices: list[int] = output.greedy_ids.tolist()  # the one place where the host waits for the device
    note_cost(sessions, segments, launch_seconds + clock.seconds)
    drawn = _draw(output, sessions, segments)
    row = 0
    for session, segment, part, tokens in zip(
        sessions, segments, _split(output, sessions, segments, drawn), drawn, strict=True
    ):
        own = select_taps(part, taps, session.drafter.wants_taps) if taps else part
        yield session, segment, Answer(own, choices[row : row + segment.num_logits], tokens)
        row += segment.num_logits


def _draw(
    output: ForwardOutput, sessions: Sequence[Session], segments: Sequence[Segment]
) -> Sequence[Sequence[int] | None]:
    started = time.perf_counter()
    drawn = draw_sampled(output.logits, sessions, [segment.num_logits for segment in segments])
    charge_rows(sessions, [len(tokens or ()) for tokens in drawn], time.perf_counter() - started)
    return drawn


def _split(
    output: ForwardOutput,
    sessions: Sequence[Session],
    segments: Sequence[Segment],
    drawn: Sequence[Sequence[int] | None],
) -> Sequence[ForwardOutput]:
    """The rows of each session; empty where no session reads any: hundreds of views take their time."""
    if len(sessions) == 1 or any(map(_reads_rows, sessions, drawn)):
        return output.split(segments)
    return [ForwardOutput(output.logits[:0], output.greedy_ids[:0], None)] * len(sessions)


def _reads_rows(session: Session, drawn: Sequence[int] | None) -> bool:
    return session.reads_rows or (drawn is None and session.reads_logits and not session.is_prefilling)


def select_taps(output: ForwardOutput, tapped: Sequence[int], wanted: Sequence[int]) -> ForwardOutput:
    """Keeps the hidden states of the ``wanted`` layers, of those of all ``tapped`` ones."""
    if output.taps is None or tuple(tapped) == tuple(wanted):
        return output
    parts = output.taps.chunk(len(tapped), dim=-1)
    own = [parts[tapped.index(layer)] for layer in wanted]
    return output._replace(taps=torch.cat(own, dim=-1) if own else None)
