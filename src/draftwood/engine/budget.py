"""How large a tree should be on this machine when the user leaves it to us.

A few short forwards tell what n positions cost beside one. What they bring is what the running request has seen: how
often guesses at depth 1, 2, ... were right. Each cycle takes the size with the most expected tokens per unit of time,
which is one, plain decoding, where guesses do not pay.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from draftwood.engine.stats import RequestStats
from draftwood.target.base import Segment, Target, chain_parents

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 60)
MAX_COST = 5.0  # times a single position: beyond that no tree of that size pays
REPEATS = 3
PRIOR_RATE, PRIOR_TRIALS = 0.7, 4.0  # what is believed of a guess behind a right one before any was tried
NEGLIGIBLE = 0.01  # a guess reached so rarely brings nothing, nor do those behind it
EXPLORE_EVERY = 16  # cycles without guesses after which one is tried again


@dataclass(frozen=True, slots=True)
class CostCurve:
    """What a pass over ``sizes`` positions costs, relative to one."""

    sizes: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def best_size(self, stats: RequestStats) -> int:
        """The size with the most expected tokens per cost, for a chain as good as those the request has seen."""
        tokens = expected_tokens(stats, self.largest)
        size = max(zip(self.sizes, self.costs, strict=True), key=lambda pair: tokens[pair[0] - 1] / pair[1])[0]
        explores = stats.cycles % EXPLORE_EVERY == EXPLORE_EVERY - 1 and len(self.sizes) > 1
        return self.sizes[1] if size == 1 and explores else size


def expected_tokens(stats: RequestStats, largest: int) -> list[float]:
    """Tokens a cycle with 1, 2, ... ``largest`` nodes in a chain emits: the bonus, and every guess that is reached."""
    total = reach = 1.0
    totals = [total]
    for depth in range(1, largest):
        tried = stats.accepted_by_depth[depth - 1] if depth > 1 else stats.tried_by_depth[1]
        tried = min(tried, stats.tried_by_depth[depth])  # a right guess may have had nothing behind it
        reach *= min(1.0, (stats.accepted_by_depth[depth] + PRIOR_RATE * PRIOR_TRIALS) / (tried + PRIOR_TRIALS))
        total += reach
        totals.append(total)
        if reach < NEGLIGIBLE:
            break
    return totals + [total] * (largest - len(totals))


def measure_costs(target: Target) -> CostCurve | None:
    """Times growing passes until they cost too much: well under a second on any machine that is of use.

    None if the cache has no room for that now.
    """
    limit = min(target.info.context_length, target.num_slots)
    sizes = tuple(size for size in SIZES if size <= limit)
    if not target.can_open(sizes[-1]):
        return None
    sequence = target.open(sizes[-1])
    try:
        _seconds(target, sequence, 1)  # warm-up
        single = _seconds(target, sequence, 1)
        costs: list[float] = []
        for size in sizes:
            cost = _seconds(target, sequence, size) / single if size > 1 else 1.0
            if cost > MAX_COST:
                break
            costs.append(max(cost, costs[-1] if costs else 1.0))  # a dip is noise
        return CostCurve(sizes[: len(costs)], tuple(costs))
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
