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
from draftwood.target.base import ForwardOutput, Segment, Target


def step(target: Target, sessions: Sequence[Session]) -> list[TokenEvent]:
    segments = [session.propose() for session in sessions]
    output, choices = _verify(target, sessions, segments)
    events = []
    for session, segment, part in zip(sessions, segments, output.split(segments), strict=True):
        if session.is_prefilling:
            target.keep(session.sequence, range(len(segment.token_ids)))
            session.read_prompt(segment, part)
            continue
        started = time.perf_counter()
        accepted = session.accept(part, choices[: segment.num_logits])
        event = session.emit(accepted, part)
        # Committed are all tokens but the last: the root and the accepted nodes before it.
        target.keep(session.sequence, accepted.path[: len(event.token_ids)])
        session.stats.accept_seconds += time.perf_counter() - started
        choices = choices[segment.num_logits :]
        events.append(event)
    return events


def _verify(
    target: Target, sessions: Sequence[Session], segments: Sequence[Segment]
) -> tuple[ForwardOutput, list[int]]:
    """The forward pass, and the target's greedy choices on the host; each request is charged its share of the time."""
    started = time.perf_counter()
    output = target.forward(segments)
    choices: list[int] = output.greedy_ids.tolist()  # the one place where the host waits for the device
    seconds = (time.perf_counter() - started) / sum(len(segment.token_ids) for segment in segments)
    for session, segment in zip(sessions, segments, strict=True):
        share = seconds * len(segment.token_ids)
        if session.is_prefilling:
            session.stats.prefill_seconds += share
        else:
            session.stats.verify_seconds += share
    return output, choices
