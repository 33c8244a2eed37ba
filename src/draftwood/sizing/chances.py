"""The chance that a node is accepted, learned online, and the nodes that pay.

The chance of a node is the product, along its path, of the acceptance rates of each node given its parent. Rates are
kept per kind: source, the source's own estimate, depth, and for first guesses whether the last first guess was right.
A rate starts from the rates of earlier requests of the drafter, and those start from a part of the source's estimate.

Chances of chosen nodes are computed in Python and in C (compiled/sizing.h) with bit-identical results: every cycle does
it for dozens of nodes.
"""

from __future__ import annotations

import ctypes
from array import array
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from draftwood.compiled import Core, ExperienceRecord, GuessesRecord, RulesRecord, load_core
from draftwood.tree import DraftTree

Kind = tuple[str, int, int, bool]

ESTIMATES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)  # bucket edges of the sources' own estimates
DEEP = 3  # all depths from here on share a bucket
TRUST = 0.7  # sources overestimate: the part of an estimate that is believed before the first trial
PRIOR_TRIALS = 3.0  # weight of the prior
CALIBRATED_TRIALS = 100.0  # the same for drafters whose estimates are learned rates, which are believed in full
DISCOUNT = 0.93  # of chances, since they are uncertain and costs are not
KINDS_OF_A_SOURCE = (len(ESTIMATES) + 1) * (DEEP + 1) * 2


RULES, CALIBRATED_RULES = (
    RulesRecord(trust, prior_trials, DISCOUNT, DEEP, len(ESTIMATES), ESTIMATES)
    for trust, prior_trials in ((TRUST, PRIOR_TRIALS), (1.0, CALIBRATED_TRIALS))
)


class _Numbers(dict[str, int]):
    """Numbers sources in the order of appearance."""

    def __missing__(self, source: str) -> int:
        self[source] = len(self)
        return self[source]


class AcceptanceRecord:
    """Acceptance rates by kind, given that the parent was accepted."""

    def __init__(self, decay: float, before: AcceptanceRecord | None = None, *, is_calibrated: bool = False) -> None:
        """``before``: the record that provides the priors. ``is_calibrated``: estimates are learned rates."""
        self.decay = decay
        self.rules: RulesRecord = before.rules if before else CALIBRATED_RULES if is_calibrated else RULES
        self._before = before
        self._numbers: _Numbers = _Numbers() if before is None else before._numbers
        self._counts = array("d")  # by kind: trials, hits; decayed

    def rate(self, kind: Kind, estimate: float) -> float:
        """``estimate``: the prior where no record has any trials."""
        return self._rate(self._place(kind), estimate)

    def note(self, kind: Kind, right: float) -> None:
        """``right``: 1 or 0, or the fraction of several guesses that count as one trial."""
        self._note(self._place(kind), right)

    def numbers_of(self, sources: Sequence[str]) -> array[int]:
        """The numbers of sources, the same in this record and in the one before."""
        return array("i", list(map(self._numbers.__getitem__, sources)))

    def address(self) -> int:
        """Address of the counts; valid until another source gets a number."""
        self._make_room()
        return self._counts.buffer_info()[0]

    def _make_room(self) -> None:
        missing = 2 * KINDS_OF_A_SOURCE * len(self._numbers) - len(self._counts)
        if missing > 0:
            self._counts.extend([0.0] * missing)

    def _place(self, kind: Kind) -> int:
        source, estimate, depth, in_run = kind
        number = self._numbers[source]
        return (((number * (len(ESTIMATES) + 1) + estimate) * (DEEP + 1) + depth) * 2 + in_run) * 2

    def _rate(self, place: int, estimate: float) -> float:
        believed = estimate if self._before is None else self._before._rate(place, estimate)
        counts = self._counts
        trials, hits = (counts[place], counts[place + 1]) if place < len(counts) else (0.0, 0.0)
        prior_trials: float = self.rules.prior_trials
        return min(1.0, (hits + prior_trials * believed) / (trials + prior_trials))

    def _note(self, place: int, right: float) -> None:
        self._make_room()
        counts = self._counts
        counts[place] = counts[place] * self.decay + 1.0
        counts[place + 1] = counts[place + 1] * self.decay + right
        if self._before is not None:
            self._before._note(place, right)


class PassCosts(NamedTuple):
    """Costs and yield of the pass that a tree shares with other requests."""

    seconds: array[float]  # of passes over 1, 2, ... positions in all
    others: int  # positions of other requests
    tokens: float  # expected from other requests
    drafting: float  # seconds, independent of the size


class Choice(NamedTuple):
    kept: Sequence[int]  # nodes, ascending
    expected: float  # tokens of the cycle


class Guesses(Protocol):
    """Chances of one request's chosen nodes."""

    def chances(self, tree: DraftTree) -> list[float]:
        """The chance of every node but the root."""

    def best_part(self, tree: DraftTree, verified_in: PassCosts) -> Choice:
        """The nodes with the largest chances, as many as make expected tokens per second highest."""

    def note(self, offered: DraftTree, emitted: Sequence[int]) -> None:
        """Counts the nodes whose outcome is known: the children of the root and of every accepted node."""


def new_guesses(request: AcceptanceRecord, drafter: AcceptanceRecord) -> Guesses:
    """``request`` starts from the rates of ``drafter``; both are updated."""
    core = load_core()
    return PythonGuesses(request) if core is None else CompiledGuesses(core, request, drafter)


def best_size(chances: Sequence[float], verified_in: PassCosts) -> tuple[int, float]:
    """The number of nodes that maximises tokens per second, and their expected tokens; chances are sorted."""
    tokens = list(accumulate(chances, initial=verified_in.tokens))[1:]  # [nodes] by size
    seconds = verified_in.seconds[verified_in.others : verified_in.others + len(tokens)]
    drafting = verified_in.drafting
    rates = [count / (time + drafting) for count, time in zip(tokens, seconds, strict=True)]
    size = rates.index(max(rates)) + 1
    return size, 1.0 + (tokens[size - 1] - tokens[0]) / DISCOUNT


class PythonGuesses:
    def __init__(self, record: AcceptanceRecord) -> None:
        self._record = record
        self._last_was_right = False

    def chances(self, tree: DraftTree) -> list[float]:
        """At most one sibling is right: later ones share what earlier ones leave."""
        rate, parents, probs = self._record.rate, tree.parents, tree.probs
        chances, left, trust = [1.0], [1.0] * len(tree), self._record.rules.trust
        for node in range(1, len(tree)):
            parent = parents[node]
            share = min(rate(self._kind(tree, node), trust * probs[node]), left[parent])
            left[parent] -= share
            chances.append(chances[parent] * share)
        return chances[1:]

    def best_part(self, tree: DraftTree, verified_in: PassCosts) -> Choice:
        chances = [1.0, *(DISCOUNT * chance for chance in self.chances(tree))]
        nodes = sorted(range(len(tree)), key=chances.__getitem__, reverse=True)  # stable: the earlier of equals first
        size, expected = best_size([chances[node] for node in nodes], verified_in)
        return Choice(sorted(nodes[:size]), expected)

    def note(self, offered: DraftTree, emitted: Sequence[int]) -> None:
        children = offered.children()
        right_nodes = followed(offered, emitted)
        for node in [0, *right_nodes][: len(emitted)]:
            for child in children[node]:
                self._record.note(self._kind(offered, child), child in right_nodes)
        self._last_was_right = bool(right_nodes)

    def _kind(self, tree: DraftTree, node: int) -> Kind:
        depth = tree.depths[node]
        in_run = self._last_was_right and depth == 1
        return tree.sources[node], bisect(ESTIMATES, tree.probs[node]), min(depth, DEEP), in_run


def followed(tree: DraftTree, emitted: Sequence[int]) -> list[int]:
    """The nodes below the root that the emitted tokens lead to, in order."""
    path = [0]
    for token in emitted:
        child = tree.child_with(path[-1], token)
        if child is None:
            break
        path.append(child)
    return path[1:]


class CompiledGuesses:
    def __init__(self, core: Core, request: AcceptanceRecord, drafter: AcceptanceRecord) -> None:
        self._core = core
        self._request, self._drafter = request, drafter
        self._record = ExperienceRecord(
            rules=ctypes.addressof(request.rules), request_decay=request.decay, drafter_decay=drafter.decay
        )
        self._tree: DraftTree | None = None
        self._columns: _Columns

    def chances(self, tree: DraftTree) -> list[float]:
        record, guesses = self._records(tree)
        chances = array("d", bytes(16 * len(tree)))
        self._core.chances(record, guesses, chances.buffer_info()[0])
        return chances[1 : len(tree)].tolist()

    def best_part(self, tree: DraftTree, verified_in: PassCosts) -> Choice:
        record, guesses = self._records(tree)
        kept, tokens = array("i", bytes(4 * len(tree))), array("d", [verified_in.tokens])
        seconds = verified_in.seconds.buffer_info()[0] + 8 * verified_in.others
        places = tokens.buffer_info()[0], seconds, verified_in.drafting, kept.buffer_info()[0]
        size = self._core.best_part(record, guesses, *places)
        if not size:
            raise MemoryError(f"a tree of {len(tree)} nodes")
        return Choice(kept[:size].tolist(), tokens[0])

    def note(self, offered: DraftTree, emitted: Sequence[int]) -> None:
        record, guesses = self._records(offered)
        tokens = array("i", emitted)
        self._core.note(record, guesses, len(tokens), tokens.buffer_info()[0])
        self._tree = None

    def _records(self, tree: DraftTree) -> tuple[int, int]:
        """Addresses of the records. A cycle uses a tree twice, to cut it and to count it."""
        if self._tree is not tree:
            self._tree, self._columns = tree, _Columns(tree, self._request.numbers_of(tree.sources))
        # New sources, in any request of the drafter, may have moved the counts.
        self._record.request_counts = self._request.address()
        self._record.drafter_counts = self._drafter.address()
        return ctypes.addressof(self._record), self._columns.address


class _Columns:
    """A tree in the layout that C reads."""

    def __init__(self, tree: DraftTree, numbers: array[int]) -> None:
        self._memory = (
            array("i", tree.tokens),
            array("i", tree.parents),
            array("i", tree.depths),
            numbers,
            array("d", tree.probs),
        )
        self._record = GuessesRecord(len(tree), *(column.buffer_info()[0] for column in self._memory))
        self.address = ctypes.addressof(self._record)
