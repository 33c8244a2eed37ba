"""Seconds of each stage of a cycle, charged to the requests that it worked for."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from draftwood.engine.session import Session
from draftwood.targets import Segment

P = ParamSpec("P")
R = TypeVar("R")


def charge_accepting(stage: Callable[Concatenate[Session, P], R]) -> Callable[Concatenate[Session, P], R]:
    """Charges what the stage takes to its session's ``accept_seconds``."""

    @wraps(stage)
    def timed(session: Session, /, *args: P.args, **kwargs: P.kwargs) -> R:
        started = time.perf_counter()
        result = stage(session, *args, **kwargs)
        session.stats.accept_seconds += time.perf_counter() - started
        return result

    return timed


class Clock:
    """Seconds of a block, once it has ended."""

    seconds = 0.0


@contextmanager
def charge_pass(sessions: Sequence[Session], segments: Sequence[Segment]) -> Iterator[Clock]:
    """Charges the block's time by positions: to prefill where a prompt is read, else to verification."""
    clock = Clock()
    started = time.perf_counter()
    yield clock
    clock.seconds = time.perf_counter() - started
    sizes = [len(segment.token_ids) for segment in segments]
    per_position = clock.seconds / sum(sizes)
    for session, size in zip(sessions, sizes, strict=True):
        if session.is_prefilling:
            session.stats.prefill_seconds += per_position * size
        else:
            session.stats.verify_seconds += per_position * size


def note_cost(sessions: Sequence[Session], segments: Sequence[Segment], seconds: float) -> None:
    """Shows the sizer what a pass took, if it verified the tree of a single request: other passes are mixtures."""
    (session, segment) = sessions[0], segments[0]
    if len(sessions) == 1 and session.sizer is not None and not session.is_prefilling:
        session.sizer.note_pass(len(segment.token_ids), len(session.tokens) - 1, seconds)


def charge_rows(sessions: Sequence[Session], num_rows: Sequence[int], seconds: float) -> None:
    """Charges acceptance that was computed for several requests at once, by rows."""
    total = sum(num_rows)
    for session, rows in zip(sessions, num_rows, strict=True):
        if rows:
            session.stats.accept_seconds += seconds * rows / total
