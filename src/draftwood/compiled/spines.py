"""Spine trees of many requests in one call: owns the records and calls the functions of spines.h."""

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_double, c_int64, c_void_p

from draftwood.compiled.context import CompiledContext
from draftwood.compiled.core import address_of
from draftwood.compiled.outcomes import Outcomes
from draftwood.compiled.table import INVALID, CompiledTable, IdRows, ScoreRows, contiguous_rows, reserve_rows
from draftwood.tree import BYPASS, DraftTree, Forest, pack_places

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
        self._rules, self.table, self.context = rules, table, context  # kept alive
        self._record = _RequestRecord(
            ctypes.addressof(rules), table.address, None if context is None else context.address, spine_rate
        )
        self.address = ctypes.addressof(self._record)

    @property
    def end(self) -> tuple[int, int]:
        """The last tokens of the text: the one before the root, and the root."""
        return self._record.previous, self._record.root

    def start(self, previous: int, root: int) -> None:
        """The text ends with these tokens."""
        self._record.previous, self._record.root = previous, root

    def follow(self, tree: DraftTree, path: Sequence[int], emitted: Sequence[int]) -> None:
        """Learns from a verified tree all but the rows of its nodes and the text."""
        nodes, tokens = array("i", path), array("i", emitted)
        own, text = (len(nodes), nodes.buffer_info()[0]), (len(tokens), tokens.buffer_info()[0])
        self.core.follow_spine(self.address, pack_places([tree]), *own, *text)

    @property
    def spine_rate(self) -> float:
        return float(self._record.spine_rate)


def propose_spines(requests: Sequence[CompiledSpines], budgets: Sequence[int]) -> list[DraftTree]:
    """The tree of each request."""
    count, forest = len(requests), Forest(sum(budgets), len(requests))
    addresses, limits = array("q", [request.address for request in requests]), array("q", budgets)
    routes = array("q", bytes(8 * count))
    if requests[0].core.propose_spines(
        count,
        addresses.buffer_info()[0],
        limits.buffer_info()[0],
        forest.capacity,
        forest.address,
        forest.probs_address,
        forest.places.buffer_info()[0],
        routes.buffer_info()[0],
    ):
        raise MemoryError(f"trees of {forest.capacity} nodes")
    return DraftTree.all_in(forest, [ROUTES[route] for route in routes])


def observe_spines(
    requests: Sequence[CompiledSpines], outcomes: Outcomes, first_rows: Sequence[int], ids: IdRows, scores: ScoreRows
) -> None:
    """Learns from the verified trees of many requests: the rows of all nodes, and what is now text.

    ``first_rows``: of the trees, in ``ids`` and ``scores [R, K]``.
    """
    for request, emitted in zip(requests, outcomes.emitted, strict=True):
        if request.context is not None:
            request.context.reserve(len(emitted))
    reserve_rows([request.table for request in requests], ids, scores)
    memory = array("q", [request.address for request in requests]), array("q", first_rows)
    kept = contiguous_rows(ids, scores)
    if requests[0].core.observe_spines(
        len(requests),
        memory[0].buffer_info()[0],
        *outcomes.memory.arguments,
        memory[1].buffer_info()[0],
        *map(address_of, kept),
    ):
        raise IndexError(INVALID)
