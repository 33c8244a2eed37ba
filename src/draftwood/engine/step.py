"""One cycle of the engine. Read this file first.

Every running request contributes a segment: its drafter's tree, or a stretch of its prompt. The target checks all of
them in one forward pass. Each request then keeps the longest path the target agrees with, up to a stop condition; the
accepted nodes stay in the cache, the others are forgotten, and the drafter learns from the target's answer.
Plain decoding is the same cycle with trees that are only their roots.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from draftwood.engine.events import TokenEvent
from draftwood.engine.session import Session
from draftwood.engine.sizing import beside
from draftwood.target.base import ForwardOutput, Segment, Target


def step(target: Target, sessions: Sequence[Session]) -> list[TokenEvent]:
    """Runs a cycle for all sessions. One that fails is marked (``session.error``) and does not disturb the others."""
    loads = beside([session.load for session in sessions])
    segments = [session.propose(load) for session, load in zip(sessions, loads, strict=True)]
    running = [(session, segment) for session, segment in zip(sessions, segments, strict=True) if segment is not None]
    if not running:
        return []
    target.set_top(max(session.drafter.wants_top for session, _ in running))
    output, choices = _verify(target, running)
    events = []
    row = 0
    for (session, segment), part in zip(running, output.split([segment for _, segment in running]), strict=True):
        started = time.perf_counter()
        chosen = choices[row : row + segment.num_logits]
        row += segment.num_logits
        if session.is_prefilling:
            target.keep(session.sequence, range(len(segment.token_ids)))
            session.read_prompt(segment, part)
            continue
        accepted, event = session.take(part, chosen)
        if event is not None:
            # Committed are all tokens but the last: the root and the accepted nodes before it.
            target.keep(session.sequence, accepted.path[: len(event.token_ids)])
            session.stats.accept_seconds += time.perf_counter() - started
            events.append(event)
    return events


def _verify(target: Target, running: Sequence[tuple[Session, Segment]]) -> tuple[ForwardOutput, list[int]]:
    """The forward pass, and the target's greedy choices on the host; each request is charged its share of the time."""
    started = time.perf_counter()
    output = target.forward([segment for _, segment in running])
    choices: list[int] = output.greedy_ids.tolist()  # the one place where the host waits for the device
    seconds = (time.perf_counter() - started) / sum(len(segment.token_ids) for _, segment in running)
    for session, segment in running:
        share = seconds * len(segment.token_ids)
        if session.is_prefilling:
            session.stats.prefill_seconds += share
        else:
            session.stats.verify_seconds += share
    return output, choices
