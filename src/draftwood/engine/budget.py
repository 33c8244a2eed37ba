"""How large a tree may be on this machine when the user leaves it to us.

A few short forwards tell what n positions cost beside one. The largest tree that costs little more than a single
position is nearly free to try, so that is the budget: dozens of nodes on a large GPU, a handful on two CPU cores.
"""

from __future__ import annotations

import time

from draftwood.target.base import Segment, Target, chain_parents

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 60)
ACCEPTABLE_COST = 1.5  # times a single position
REPEATS = 3


def measured_budget(target: Target) -> int:
    """The largest of SIZES within the acceptable cost. Stops at the first that is not: a second at the very most."""
    largest = SIZES[-1]
    if not target.can_open(largest):
        return SIZES[0]
    sequence = target.open(largest)
    try:
        _seconds(target, sequence, 1)  # warm-up
        limit = ACCEPTABLE_COST * _seconds(target, sequence, 1)
        budget = SIZES[0]
        for size in SIZES:
            if _seconds(target, sequence, size) > limit:
                break
            budget = size
        return budget
    finally:
        target.close(sequence)


def _seconds(target: Target, sequence: int, size: int) -> float:
    """The quickest of a few forwards: what else runs on the machine only ever adds."""
    segment = Segment(sequence, [0] * size, chain_parents(size), size)
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        target.forward([segment]).greedy_ids.tolist()
        times.append(time.perf_counter() - started)
    return min(times)
