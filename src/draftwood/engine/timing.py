"""Seconds of each stage of a cycle, charged to the requests that it worked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from draftwood.engine.session import Session


@dataclass(slots=True)
class Times:
    """Seconds of one cycle."""

    launched: float = 0.0  # when the pass was launched, by the clock of ``time.perf_counter``
    drafting: float = 0.0  # of the host, before the pass
    passing: float = 0.0  # launching the pass and waiting for it
    elapsed: float = 0.0  # from the launch of the pass to its answer
    accepting: float = 0.0  # of the host, after the pass


class Spent(NamedTuple):
    """What a cycle spent on which sessions."""

    sessions: Sequence[Session]
    sizes: Sequence[int]  # positions in the pass
    reading: Sequence[bool]  # whether they were a part of the prompt
    drafting: Sequence[float]  # seconds
    times: Times

    @property
    def num_read(self) -> int:
        """Tokens of prompts."""
        return sum(compress(self.sizes, self.reading))


def charge(spent: Spent) -> None:
    """Charges the pass by positions and acceptance in equal parts; where a prompt is read, by the target and then by
    the drafter, both to prefill."""
    sessions, sizes, reading, drafting, times = spent
    per_position, accepting = times.passing / sum(sizes), times.accepting / len(sessions)
    for session, size, reads, drafted in zip(sessions, sizes, reading, drafting, strict=True):
        stats = session.stats
        if reads:
            stats.prefill_seconds += per_position * size + accepting
        else:
            stats.verify_seconds += per_position * size
            stats.draft_seconds += drafted
            stats.accept_seconds += accepting


def note_costs(spent: Spent) -> None:
    """Shows the sizers what a cycle took, if it did nothing but verify trees. For the pass only the tree of a single
    request counts: other passes are mixtures of context lengths. Drawing its tokens is a part of a pass."""
    sessions, sizes, reading, drafting, times = spent
    sizer = sessions[0].sizer
    if sizer is None or any(reading):
        return
    if len(sessions) == 1:
        sizer.note_pass(sizes[0], len(sessions[0].tokens) - 1, times.elapsed)
    apart = max(times.drafting - sum(drafting), 0.0)  # drafts are counted apart
    sizer.note_host(len(sessions), sum(sizes) - len(sizes), apart + times.accepting)


def charge_rows(sessions: Sequence[Session], num_rows: Sequence[int], seconds: float) -> None:
    """Charges acceptance that was computed for some sessions at once, by rows."""
    total = sum(num_rows)
    for session, rows in zip(sessions, num_rows, strict=True):
        if rows:
            session.stats.accept_seconds += seconds * rows / total
