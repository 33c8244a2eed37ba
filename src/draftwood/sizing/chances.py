"""How likely guesses are right, learned as requests run, and which of them pay.

The chance of a node is the product, along its path, of how often guesses of its kind were right when the guess before
them was. A kind is the source, what the source itself thought of the guess, the depth, and for first guesses whether
the last one was right. Its rate starts from what earlier requests of the drafter showed, and at the very first from
most of the source's own estimate.

Chosen guesses are weighed in Python and in C (compiled/sizing.h), with the same results to the last bit: every cycle
does it, for dozens of nodes.
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

ESTIMATES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)  # edges between what sources think of a guess
DEEP = 3  # from this depth on all are alike
TRUST = 0.7  # sources are surer than they are right: so much of an estimate is believed until it was tried
PRIOR_TRIALS = 3.0  # how much experience what is believed beforehand is worth
HOPE = 0.93  # what a chance is taken for: chances are uncertain, costs are not
KINDS_OF_A_SOURCE = (len(ESTIMATES) + 1) * (DEEP + 1) * 2


class _Numbers(dict[str, int]):
    """Numbers sources as they come."""

    def __missing__(self, source: str) -> int:
        self[source] = len(self)
        return self[source]


class AcceptanceRecord:
    """How often guesses of a kind were right, given that the one before them was."""

    def __init__(self, decay: float, before: AcceptanceRecord | None = None) -> None:
        """``before``: where beliefs come from until there is experience."""
        self.decay = decay
        self._before = before
        self._numbers: _Numbers = _Numbers() if before is None else before._numbers
        self._counts = array("d")  # by kind: trials, hits; decayed

    def rate(self, kind: Kind, estimate: float) -> float:
        """``estimate``: what is believed where nobody has any experience."""
        return self._rate(self._place(kind), estimate)

    def note(self, kind: Kind, right: float) -> None:
        """``right``: 1 or 0, or the share of several that are counted as one."""
        self._note(self._place(kind), right)

    def numbers_of(self, sources: Sequence[str]) -> array[int]:
        """By which the sources are known here, and in the record before."""
        return array("i", list(map(self._numbers.__getitem__, sources)))

    def address(self) -> int:
        """Where the counts of all sources are that have a number; until one more gets its own."""
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
        return min(1.0, (hits + PRIOR_TRIALS * believed) / (trials + PRIOR_TRIALS))

    def _note(self, place: int, right: float) -> None:
        self._make_room()
        counts = self._counts
        counts[place] = counts[place] * self.decay + 1.0
        counts[place + 1] = counts[place + 1] * self.decay + right
        if self._before is not None:
            self._before._note(place, right)


class Pass(NamedTuple):
    """What there is to know of the pass a tree is to be verified in."""

    seconds: array[float]  # of passes over 1, 2, ... positions, the others' included; or for more
    others: int  # positions of other requests
    tokens: float  # that those bring
    drafting: float  # seconds that are spent whatever the size


class Choice(NamedTuple):
    kept: Sequence[int]  # nodes, ascending
    expected: float  # tokens


class Guesses(Protocol):
    """What one request's chosen guesses are worth."""

    def chances(self, tree: DraftTree) -> list[float]:
        """Of every node but the root to be accepted."""

    def best_part(self, tree: DraftTree, verified_in: Pass) -> Choice:
        """The nodes with the largest chances, as many as make expected tokens per second highest."""

    def note(self, offered: DraftTree, emitted: Sequence[int]) -> None:
        """Counts the guesses that emitted tokens tell of: the children of the root and of every right one."""


def new_guesses(request: AcceptanceRecord, drafter: AcceptanceRecord) -> Guesses:
    """``request``: what it learns, from what ``drafter`` knows."""
    core = load_core()
    return PythonGuesses(request) if core is None else CompiledGuesses(core, request, drafter)


def best_size(chances: Sequence[float], verified_in: Pass) -> tuple[int, float]:
    """How many nodes make tokens per second highest, and how many tokens they bring; the chances are in order."""
    tokens = list(accumulate(chances, initial=verified_in.tokens))[1:]  # [nodes] by size
    seconds = verified_in.seconds[verified_in.others : verified_in.others + len(tokens)]
    drafting = verified_in.drafting
    rates = [count / (time + drafting) for count, time in zip(tokens, seconds, strict=True)]
    size = rates.index(max(rates)) + 1
    return size, 1.0 + (tokens[size - 1] - tokens[0]) / HOPE


class PythonGuesses:
    def __init__(self, record: AcceptanceRecord) -> None:
        self._record = record
        self._last_was_right = False

    def chances(self, tree: DraftTree) -> list[float]:
        """One of several siblings at most is right: later ones get what earlier ones leave."""
        rate, parents, probs = self._record.rate, tree.parents, tree.probs
        chances, left = [1.0], [1.0] * len(tree)
        for node in range(1, len(tree)):
            parent = parents[node]
            share = min(rate(self._kind(tree, node), TRUST * probs[node]), left[parent])
            left[parent] -= share
            chances.append(chances[parent] * share)
        return chances[1:]

    def best_part(self, tree: DraftTree, verified_in: Pass) -> Choice:
        chances = [1.0, *(HOPE * chance for chance in self.chances(tree))]
        nodes = sorted(range(len(tree)), key=chances.__getitem__, reverse=True)  # of equals the earlier one first
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


RULES = RulesRecord(TRUST, PRIOR_TRIALS, HOPE, DEEP, len(ESTIMATES), ESTIMATES)


class CompiledGuesses:
    def __init__(self, core: Core, request: AcceptanceRecord, drafter: AcceptanceRecord) -> None:
        self._core = core
        self._request, self._drafter = request, drafter
        self._record = ExperienceRecord(
            rules=ctypes.addressof(RULES), request_decay=request.decay, drafter_decay=drafter.decay
        )
        self._tree: DraftTree | None = None
        self._columns: _Columns

    def chances(self, tree: DraftTree) -> list[float]:
        record, guesses = self._records(tree)
        chances = array("d", bytes(16 * len(tree)))
        self._core.chances(record, guesses, chances.buffer_info()[0])
        return chances[1 : len(tree)].tolist()

    def best_part(self, tree: DraftTree, verified_in: Pass) -> Choice:
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
        """Where they are. A cycle asks twice about a tree, when it cuts and when it counts."""
        if self._tree is not tree:
            self._tree, self._columns = tree, _Columns(tree, self._request.numbers_of(tree.sources))
        # Sources that got a number meanwhile, in any request of the drafter, may have moved the counts.
        self._record.request_counts = self._request.address()
        self._record.drafter_counts = self._drafter.address()
        return ctypes.addressof(self._record), self._columns.address


class _Columns:
    """A tree as C reads it."""

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
