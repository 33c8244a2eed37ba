"""One cycle of the engine. Read this file first.

Every running request contributes a segment: its drafter's tree, or a stretch of its prompt. The target checks all of
them in one forward pass. Each request then keeps the longest path the target agrees with, up to a stop condition; the
accepted nodes stay in the cache, the others are forgotten, and the drafter learns from the target's answer.
Plain decoding is the same cycle with trees that are only their roots.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

import torch

from draftwood.engine.drafting import draft
from draftwood.engine.draws import draw_together
from draftwood.engine.events import TokenEvent
from draftwood.engine.session import Session
from draftwood.sizing import ALONE, Load, beside
from draftwood.targets import ForwardOutput, PendingPass, Segment, Target

PREFILL_ROWS = 8192  # positions of prompts in one pass, about: what a pass takes of memory grows with them


class Round(NamedTuple):
    """A pass under way, and whose it is."""

    running: Sequence[tuple[Session, Segment]]
    flight: PendingPass
    taps: Sequence[int]  # the hidden states that come with it
    seconds: float  # that the host took to launch it


def step(target: Target, sessions: Sequence[Session]) -> list[TokenEvent]:
    """Runs a cycle for all sessions. One that fails is marked (``session.error``) and does not disturb the others."""
    begun = begin(target, sessions)
    return [] if begun is None else finish(target, begun)


def begin(target: Target, sessions: Sequence[Session], lane: int = 0) -> Round | None:
    """The first half of a cycle: drafts, and the pass that checks them is launched. None: nobody had anything."""
    sessions = _together(sessions)
    loads: Iterable[Load] = repeat(ALONE, len(sessions))
    if any(session.is_sized for session in sessions):
        loads = beside([session.load for session in sessions])
    drafts = draft(sessions)
    segments = [session.propose(made, load) for session, made, load in zip(sessions, drafts, loads, strict=True)]
    running = [(session, segment) for session, segment in zip(sessions, segments, strict=True) if segment is not None]
    if not running:
        return None
    drafters = [session.drafter for session, _ in running]
    target.set_top(max([drafter.wants_top for drafter in drafters]))
    taps = sorted(set().union(*[drafter.wants_taps for drafter in drafters if drafter.wants_taps]))
    target.set_taps(taps)
    started = time.perf_counter()
    flight = target.launch([segment for _, segment in running], lane)
    return Round(running, flight, taps, time.perf_counter() - started)


def _together(sessions: Sequence[Session]) -> Sequence[Session]:
    """Those that this pass has room for: of many new prompts the first ones, so that no pass takes memory for all of
    them, and requests that are answered already do not wait for all of them."""
    room, found = PREFILL_ROWS, []
    for session in sessions:
        if not session.is_prefilling:
            found.append(session)
        elif room > 0:
            room -= session.num_unread
            found.append(session)
    return found


def finish(target: Target, begun: Round) -> list[TokenEvent]:
    """The second half: what the pass says is taken, kept and learned from."""
    started = time.perf_counter()
    output = begun.flight.wait()
    choices: list[int] = output.greedy_ids.tolist()  # the one place where the host waits for the device
    _charge(begun.running, begun.seconds + time.perf_counter() - started)
    events = []
    row = 0
    drawn = _drawn(output, begun.running)
    parts = _parts(output, begun.running, drawn)
    for (session, segment), part, tokens in zip(begun.running, parts, drawn, strict=True):
        started = time.perf_counter()
        if begun.taps:
            part = own_taps(part, begun.taps, session.drafter.wants_taps)
        chosen = choices[row : row + segment.num_logits]
        row += segment.num_logits
        if session.finish_reason is not None:  # it was cancelled meanwhile
            continue
        if session.is_prefilling:
            target.keep(session.sequence, range(len(segment.token_ids)))
            session.read_prompt(segment, part)
            continue
        accepted, event = session.take(part, chosen, tokens)
        if event is not None:
            # Committed are all tokens but the last: the root and the accepted nodes before it.
            target.keep(session.sequence, accepted.path[: len(event.token_ids)])
            session.stats.accept_seconds += time.perf_counter() - started
            events.append(event)
    return events


def _drawn(output: ForwardOutput, running: Sequence[tuple[Session, Segment]]) -> list[list[int] | None]:
    """The tokens that requests draw together. Each of them is charged its share of the time."""
    started = time.perf_counter()
    drawn = draw_together(output.logits, [(session, segment.num_logits) for session, segment in running])
    seconds = time.perf_counter() - started
    num_rows = sum(len(tokens) for tokens in drawn if tokens is not None)
    for (session, _), tokens in zip(running, drawn, strict=True):
        if tokens is not None:
            session.stats.accept_seconds += seconds * len(tokens) / num_rows
    return drawn


def _parts(
    output: ForwardOutput, running: Sequence[tuple[Session, Segment]], drawn: Sequence[Sequence[int] | None]
) -> Sequence[ForwardOutput]:
    """What each request sees of the output; nothing where nobody looks: hundreds of views take their time."""
    looking = (session.looks(tokens) for (session, _), tokens in zip(running, drawn, strict=True))
    if len(running) == 1 or any(looking):
        return output.split([segment for _, segment in running])
    return [ForwardOutput(output.logits[:0], output.greedy_ids[:0], None)] * len(running)


def own_taps(output: ForwardOutput, tapped: Sequence[int], wanted: Sequence[int]) -> ForwardOutput:
    """With the hidden states that its drafter asked for, of all that came."""
    if output.taps is None or tuple(tapped) == tuple(wanted):
        return output
    parts = output.taps.chunk(len(tapped), dim=-1)
    own = [parts[tapped.index(layer)] for layer in wanted]
    return output._replace(taps=torch.cat(own, dim=-1) if own else None)


def _charge(running: Sequence[tuple[Session, Segment]], seconds: float) -> None:
    """Each request is charged its share of the time that the host spends on a pass."""
    sizes = [len(segment.token_ids) for _, segment in running]
    per_position = seconds / sum(sizes)
    for (session, _), size in zip(running, sizes, strict=True):
        share = per_position * size
        if session.is_prefilling:
            session.stats.prefill_seconds += share
        else:
            session.stats.verify_seconds += share
