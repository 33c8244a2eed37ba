"""Spine trees of many requests in one call: owns the records and calls the functions of spines.h."""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p

from draftwood.compiled.context import CompiledContext
from draftwood.compiled.outcomes import Outcomes
from draftwood.compiled.table import CompiledTable
from draftwood.tree import BYPASS, DraftTree, Forest

BYPASSES, VOTES = ("copied", "matched", "agreed", "never", "auto"), ("off", "sizes", "places")  # as in spines.h
ROUTES = ("", "branch", "spine", BYPASS)
MAX_SPINE = 1024


class SpineRules(ctypes.Structure):
    """``SpineRules`` of spines.h. Choices are indices into ``BYPASSES`` and ``VOTES``, sources are numbers."""

    _fields_ = (
        *((name, c_int64) for name in ("max_draft", "repeat", "bypass", "bypass_length", "bypass_budget", "votes")),
        *((name, c_int64) for name in ("branch_depth", "spine_branches", "spine_source", "branch_source")),
        *((name, c_double) for name in ("spine_share", "min_score", "smoothing", "low_rate", "high_rate")),
        *((name, c_double) for name in ("low_ratio", "middle_ratio", "high_ratio")),
    )


class _RequestRecord(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("rules", "table", "context")),
        ("spine_rate", c_double),
        ("previous", c_int64),
        ("root", c_int64),
    )


class CompiledSpines:
    """The spine trees of one request."""

    def __init__(
        self, rules: SpineRules, table: CompiledTable, context: CompiledContext | None, spine_rate: float
    ) -> None:
        self.core = table.core
        self._memory = rules, table, context  # kept alive
        self._record = _RequestRecord(
            ctypes.addressof(rules), table.address, None if context is None else context.address, spine_rate
        )
        self.address = ctypes.addressof(self._record)

    def start(self, previous: int, root: int) -> None:
        """The text ends with these tokens."""
        self._record.previous, self._record.root = previous, root

    @property
    def spine_rate(self) -> float:
        return float(self._record.spine_rate)


def propose_spines(requests: Sequence[CompiledSpines], budgets: Sequence[int]) -> list[DraftTree | None]:
    """The tree of each request; None: only its root."""
    count, forest = len(requests), Forest(sum(budgets))
    addresses, limits = array("q", [request.address for request in requests]), array("q", budgets)
    sizes, routes = array("q", bytes(8 * count)), array("q", bytes(8 * count))
    if requests[0].core.propose_spines(
        count,
        addresses.buffer_info()[0],
        limits.buffer_info()[0],
        forest.capacity,
        forest.address,
        forest.probs_address,
        sizes.buffer_info()[0],
        routes.buffer_info()[0],
    ):
        raise MemoryError(f"trees of {forest.capacity} nodes")
    trees, start = list[DraftTree | None](), 0
    for size, route, budget in zip(sizes, routes, budgets, strict=True):
        trees.append(DraftTree.packed_in(forest, start, size, ROUTES[route]) if size > 1 else None)
        start += budget
    return trees


def follow_spines(requests: Sequence[CompiledSpines], outcomes: Outcomes, ends: Sequence[int]) -> None:
    """Learns from verified trees. ``ends``: the last two tokens of each text, one after the other."""
    memory = array("q", [request.address for request in requests]), array("q", ends)
    addresses, last = [part.buffer_info()[0] for part in memory]
    requests[0].core.follow_spines(
        len(requests), addresses, outcomes.memory.places, outcomes.memory.path_lengths, outcomes.memory.path_nodes, last
    )
