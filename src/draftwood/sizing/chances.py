"""The chance that a node is accepted, learned online.

The chance of a node is the product, along its path, of the acceptance rates of each node, given that its parent was
accepted and that no sibling before it was right: at most one sibling is. Rates are kept per kind: source, the source's
own estimate, given the same, depth, and for first guesses whether the last first guess was right. A rate starts from
the rates of earlier requests of the drafter, and those start from a part of the source's estimate. Rare guesses keep
these priors longer: most of the time, none of the last ones was right, which says little.

Chances of chosen nodes are computed in Python and in C (compiled/sizing.h) with bit-identical results: every cycle does
it for dozens of nodes.
"""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect
from collections.abc import Sequence
from itertools import chain
from typing import Protocol

from draftwood.compiled import Core, ExperienceRecord, RulesRecord, load_core
from draftwood.tree import SOURCE_NUMBERS, DraftTree, pack_places

Kind = tuple[str, int, int, bool]

ESTIMATES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)  # bucket edges of the sources' own estimates
DEEP = 3  # all depths from here on share a bucket
TRUST = 0.7  # sources overestimate: the part of an estimate that is believed before the first trial
PRIOR_TRIALS = 3.0  # weight of the prior
PRIOR_HITS = 1.5  # weight of the prior of rare guesses: as many trials as bring so many hits
MIN_RATE = 1e-4  # guesses count as no rarer than this
CALIBRATED_TRIALS = 100.0  # the same for drafters whose estimates are learned rates, which are believed in full
DISCOUNT = 0.93  # of chances, since they are uncertain and costs are not
FADE = 0.97  # of what nodes teach, from each to the next in a tree: later ones are seldom new
KINDS_OF_A_SOURCE = (len(ESTIMATES) + 1) * (DEEP + 1) * 2


RULES, CALIBRATED_RULES = (
    RulesRecord(trust, prior_trials, PRIOR_HITS, MIN_RATE, DISCOUNT, FADE, DEEP, len(ESTIMATES), ESTIMATES)
    for trust, prior_trials in ((TRUST, PRIOR_TRIALS), (1.0, CALIBRATED_TRIALS))
)
RULES_ADDRESS = ctypes.addressof(RULES)


class AcceptanceRecord:
    """Acceptance rates by kind, given that the parent was accepted and earlier siblings are wrong."""

    def __init__(self, decay: float, before: AcceptanceRecord | None = None, *, is_calibrated: bool = False) -> None:
        """``before``: the record that provides the priors. ``is_calibrated``: estimates are learned rates."""
        self.decay = decay
        self.rules: RulesRecord = before.rules if before else CALIBRATED_RULES if is_calibrated else RULES
        self._before = before
        self._counts = array("d")  # by kind: trials, hits; decayed

    def rate(self, kind: Kind, estimate: float) -> float:
        """``estimate``: the prior where no record has any trials."""
        return self._rate(self._place(kind), estimate)

    def note(self, kind: Kind, right: float) -> None:
        """``right``: 1 or 0, or the fraction of several guesses that count as one trial."""
        self._note(self._place(kind), right)

    def address(self) -> int:
        """Address of the counts; valid until another source gets a number."""
        self._make_room()
        return self._counts.buffer_info()[0]

    def _make_room(self) -> None:
        missing = 2 * KINDS_OF_A_SOURCE * len(SOURCE_NUMBERS) - len(self._counts)
        if missing > 0:
            self._counts.frombytes(bytes(self._counts.itemsize * missing))

    def _place(self, kind: Kind) -> int:
        source, estimate, depth, in_run = kind
        number = SOURCE_NUMBERS[source]
        return (((number * (len(ESTIMATES) + 1) + estimate) * (DEEP + 1) + depth) * 2 + in_run) * 2

    def _rate(self, place: int, estimate: float) -> float:
        believed = estimate if self._before is None else self._before._rate(place, estimate)
        counts = self._counts
        trials, hits = (counts[place], counts[place + 1]) if place < len(counts) else (0.0, 0.0)
        rules = self.rules
        likely = believed if believed * trials > hits else hits / (trials or 1.0)
        weight = max(rules.prior_trials, rules.prior_hits / max(likely, rules.min_rate))
        return float(min(1.0, (hits + weight * believed) / (trials + weight)))

    def _note(self, place: int, right: float) -> None:
        self._make_room()
        counts = self._counts
        counts[place] = counts[place] * self.decay + 1.0
        counts[place + 1] = counts[place + 1] * self.decay + right
        if self._before is not None:
            self._before._note(place, right)


class Guesses(Protocol):
    """Chances of one request's chosen nodes."""

    def chances(self, tree: DraftTree) -> list[float]:
        """The chance of every node but the root."""

    def note(self, offered: DraftTree, emitted: Sequence[int]) -> None:
        """Counts the nodes whose outcome is known: the children of the root and of every accepted node, up to the right
        one."""


def new_guesses(request: AcceptanceRecord, drafter: AcceptanceRecord) -> Guesses:
    """``request`` starts from the rates of ``drafter``; both are updated."""
    core = load_core()
    return PythonGuesses(request) if core is None else CompiledGuesses(core, request, drafter)


class PythonGuesses:
    def __init__(self, record: AcceptanceRecord) -> None:
        self._record = record
        self._edges = [record.rules.trust * edge for edge in ESTIMATES]
        self._last_was_right = False

    def chances(self, tree: DraftTree) -> list[float]:
        rate, parents = self._record.rate, tree.parents
        probs, left = self._believed(tree), [1.0] * len(tree)
        chances, still_open = [1.0], [1.0]  # open: the node is accepted, and none of its children so far is right
        for node in range(1, len(tree)):
            parent = parents[node]
            estimate = _estimate(probs[node], left[parent])
            left[parent] = max(left[parent] - probs[node], 0.0)
            chances.append(still_open[parent] * rate(self._kind(tree, node, estimate), estimate))
            still_open.append(chances[node])
            still_open[parent] -= chances[node]
        return chances[1:]

    def note(self, offered: DraftTree, emitted: Sequence[int]) -> None:
        children, probs = offered.children(), self._believed(offered)
        right_nodes = offered.follow(emitted)
        for node in [0, *right_nodes][: len(emitted)]:
            left = 1.0
            for child in children[node]:
                is_right = child in right_nodes
                self._record.note(self._kind(offered, child, _estimate(probs[child], left)), is_right)
                left = max(left - probs[child], 0.0)
                if is_right:
                    break
        self._last_was_right = bool(right_nodes)

    def _kind(self, tree: DraftTree, node: int, estimate: float) -> Kind:
        depth = tree.depths[node]
        in_run = self._last_was_right and depth == 1
        return tree.sources[node], bisect(self._edges, estimate), min(depth, DEEP), in_run

    def _believed(self, tree: DraftTree) -> list[float]:
        """The believed parts of the estimates. Drafters may be third-party code: none is negative, and NaN is 0."""
        trust = self._record.rules.trust
        return [trust * prob if prob > 0.0 else 0.0 for prob in tree.probs]


def _estimate(prob: float, left: float) -> float:
    """A probability, if no sibling before the node is right; ``left``: what those leave of a total of 1."""
    return prob / left if left > prob else float(prob > 0.0)


class CompiledGuesses:
    __slots__ = ("_address", "_drafter", "_num_sources", "_record", "_request", "core")

    def __init__(self, core: Core, request: AcceptanceRecord, drafter: AcceptanceRecord) -> None:
        self.core = core
        self._request, self._drafter = request, drafter
        self._record = ExperienceRecord(
            rules=ctypes.addressof(request.rules), request_decay=request.decay, drafter_decay=drafter.decay
        )
        self._address = ctypes.addressof(self._record)
        self._num_sources = 0  # that the counts have room for

    def chances(self, tree: DraftTree) -> list[float]:
        chances, place = array("d", bytes(24 * len(tree))), pack_places([tree])  # first, since it may add a source
        self.core.chances(self.address(), place, chances.buffer_info()[0])
        return chances[1 : len(tree)].tolist()

    def note(self, offered: DraftTree, emitted: Sequence[int]) -> None:
        note_all(self.core, [self], [offered], [emitted])

    def address(self) -> int:
        """Of the record in C; valid until another source gets a number, in any tree that is packed."""
        if self._num_sources != len(SOURCE_NUMBERS):
            self._record.request_counts = self._request.address()
            self._record.drafter_counts = self._drafter.address()
            self._num_sources = len(SOURCE_NUMBERS)
        return self._address


def note_all(
    core: Core, guesses: Sequence[CompiledGuesses], offered: Sequence[DraftTree], emitted: Sequence[Sequence[int]]
) -> None:
    """As ``note`` of each request."""
    places = pack_places(offered)  # first, since a new source moves the records
    records, lengths = array("q", [each.address() for each in guesses]), array("q", map(len, emitted))
    tokens = array("i", list(chain.from_iterable(emitted)))
    core.note(len(guesses), records.buffer_info()[0], places, lengths.buffer_info()[0], tokens.buffer_info()[0])
