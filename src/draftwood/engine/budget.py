"""How large a tree should be on this machine when the user leaves it to us.

A few short forwards tell what n positions cost beside one. What they bring is what the running request has seen: how
often guesses at depth 1, 2, ... were right, apart for times when the last guess was right and when it was wrong, since
right guesses come in runs. Each cycle takes the size with the most expected tokens per unit of time, which is one,
plain decoding, where guesses do not pay. The drafter is asked all the same: whether its first guess would have been
right shows in the token that the target chose, and costs nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from draftwood.target.base import Segment, Target, chain_parents
from draftwood.tree import DraftTree

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 60)
MAX_COST = 5.0  # times a single position: beyond that no tree of that size pays
REPEATS = 3
PRIOR_RATES = {True: 0.8, False: 0.4}  # what is believed of a guess behind a right one, and behind a wrong one
PRIOR_TRIALS = 4.0  # how much experience that belief is worth
NEGLIGIBLE = 0.01  # a guess reached so rarely brings nothing, nor do those behind it


class GuessRecord:
    """How right one request's guesses were so far."""

    def __init__(self) -> None:
        self._tried = {False: Counter[int](), True: Counter[int]()}  # by what the last guess was, and depth
        self._right = {False: Counter[int](), True: Counter[int]()}
        self._last_was_right = False

    def note(self, offered: DraftTree, verified: DraftTree, path: Sequence[int], first_token: int) -> None:
        """Counts one cycle: the tree the drafter offered, the part of it that was verified, and what came of it."""
        if len(offered) == 1:
            return
        was_right = first_token in (offered.tokens[node] for node in offered.children_of(0))
        tried, right = self._tried[self._last_was_right], self._right[self._last_was_right]
        tried[1] += 1
        right[1] += was_right
        accepted = len(path) - 1
        for depth in range(2, min(accepted + 1, max(verified.depths)) + 1):
            tried[depth] += 1
            right[depth] += depth <= accepted
        self._last_was_right = was_right

    def expected_tokens(self, largest: int) -> list[float]:
        """Tokens a cycle with 1, 2, ... ``largest`` nodes in a chain emits: the bonus, and every guess it reaches."""
        tried, right = self._tried[self._last_was_right], self._right[self._last_was_right]
        total = reach = 1.0
        totals = [total]
        for depth in range(1, largest):
            prior = PRIOR_RATES[depth > 1 or self._last_was_right]
            reach *= (right[depth] + prior * PRIOR_TRIALS) / (tried[depth] + PRIOR_TRIALS)
            total += reach
            totals.append(total)
            if reach < NEGLIGIBLE:
                break
        return totals + [total] * (largest - len(totals))


@dataclass(frozen=True, slots=True)
class CostCurve:
    """What a pass over ``sizes`` positions costs, relative to one."""

    sizes: tuple[int, ...]
    costs: tuple[float, ...]

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def best_size(self, record: GuessRecord) -> int:
        """The size with the most expected tokens per cost."""
        tokens = record.expected_tokens(self.largest)
        return max(zip(self.sizes, self.costs, strict=True), key=lambda pair: tokens[pair[0] - 1] / pair[1])[0]


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
