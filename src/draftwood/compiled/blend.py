"""One tree from several sources, in C: owns the memory of what is learned and calls the functions of blend.h."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from draftwood.compiled.core import Core, address_of
from draftwood.compiled.outcomes import Outcomes
from draftwood.compiled.table import INVALID, CompiledTable, IdRows, ScoreRows, contiguous_rows, reserve_rows
from draftwood.tree import ROOT_SOURCE, SOURCE_NUMBERS, DraftTree, Forest

TAIL, MAX_SOURCES, MAX_HINTS = 32, 8, 64  # as in blend.h and hints.h
SURE = 1.5  # log odds of a hint from which its source is sure; as in blend.h
NONE = -1
RESERVED = 256  # tokens that sources make room for at a time

Floats = npt.NDArray[np.float64]


class Hints(NamedTuple):
    """What a source knows about the token after a text."""

    tokens: Sequence[int]
    kinds: Sequence[int]  # of these tokens
    absent: int  # kind of all other tokens


class Harvest(NamedTuple):
    """A verified tree with what the target found likely after each of its nodes."""

    tree: DraftTree
    path: Sequence[int]  # accepted nodes, root first
    num_emitted: int  # tokens that are now text
    ids: npt.NDArray[np.int32]  # [N, K] best first
    scores: npt.NDArray[np.float32]  # [N, K] probabilities


class CompiledSource(NamedTuple):
    """A source in C."""

    look: str  # function that gives the same hints
    address: int  # of its data
    follow: str = ""  # function that reads a verified tree: ``learn`` and ``extend``; empty: there is nothing to do
    reserve: Callable[[int], None] | None = None  # makes room for tokens, before ``follow``


class HintSource(Protocol):
    """Suggests what follows a text, from its last tokens alone.

    A *kind* says how good a hint is (the length of a match, the bucket of a probability); acceptance is learned per
    kind.
    """

    name: str
    priors: Sequence[float]  # acceptance rate of each kind before anything is learned

    def extend(self, tokens: Sequence[int]) -> None:
        """Read tokens that are now text."""

    def learn(self, seen: Harvest) -> None:
        """Read the target's rows after the nodes of the last tree; comes before ``extend``."""

    def look(self, tail: Sequence[int], depth: int, /) -> Hints | None:
        """Hints after a text that ends with ``tail``; None if it knows nothing about it. ``depth``: how many of these
        tokens are drafted."""

    def compiled(self) -> CompiledSource | None:
        """The functions of hints.h that do the same; None if there are none."""


class Learned:
    """What drafting has taught about the sources of a blend; requests share it."""

    def __init__(self, priors: Sequence[tuple[Sequence[float], float]], *, learns: bool = True) -> None:
        """``priors``: by source, the rates of its kinds and how many trials they count as. ``learns``: whether outcomes
        change anything."""
        self.learns = learns
        rates = [np.array(own, np.float64) for own, _ in priors]
        self.trials: list[Floats] = [np.full(len(own), trials) for own, trials in priors]
        self.hits: list[Floats] = [own * trials for own, trials in zip(rates, self.trials, strict=True)]
        self.logits: list[Floats] = [np.log(own / (1.0 - own)) for own in rates]
        count = len(rates)
        # By whether a source is sure and by state, bias first.
        self.weights: Floats = np.zeros((2, 3**count, count + 1))
        for state in range(1, 3**count):
            informed = [source for source in range(count) if state // 3**source % 3]
            # Two sources that agree are surer than one, but their evidence overlaps.
            self.weights[:, state, [source + 1 for source in informed]] = 1.0 if len(informed) == 1 else 0.6


def state_of(informed: int, listed: int) -> int:
    """Number of the weights of a guess, by bits of sources: each knows nothing, is silent about it, or hints at it."""
    return sum(3**bit * ((informed >> bit & 1) + (listed >> bit & 1)) for bit in range(MAX_SOURCES))


class _HintsRecord(ctypes.Structure):
    _fields_ = (
        ("count", c_int64),
        ("tokens", c_int32 * MAX_HINTS),
        ("kinds", c_int32 * MAX_HINTS),
        ("absent", c_int32),
    )


class _SourceRecord(ctypes.Structure):
    _fields_ = tuple((name, c_void_p) for name in ("look", "follow", "data", "trials", "hits", "logits"))


class _BlendRecord(ctypes.Structure):
    _fields_ = (
        ("num_sources", c_int64),
        ("sources", c_void_p),
        ("weights", c_void_p),
        ("decay", c_double),
        ("step", c_double),
        ("bias_step", c_double),
        ("names", c_void_p),
        ("learns", c_int64),
        ("end_length", c_int64),
        ("end_tokens", c_int32 * TAIL),
    )


_Look = ctypes.CFUNCTYPE(None, c_void_p, ctypes.POINTER(c_int32), c_int64, c_int64, ctypes.POINTER(_HintsRecord))


class CompiledBlend:
    """Grows the trees of one request."""

    def __init__(
        self, core: Core, sources: Sequence[HintSource], learned: Learned, decay: float, step: float, bias_step: float
    ) -> None:
        self.core = core
        self._sources = sources
        self._callbacks: list[Any] = []  # kept alive
        compiled = [source.compiled() for source in sources]
        self.follows = None not in compiled  # whether ``observe_blends`` can replace ``learn`` and what sources read
        self._reserve = [each.reserve for each in compiled if each is not None and each.reserve is not None]
        self._room = 0  # tokens that sources can still read
        records = (_SourceRecord * len(sources))()
        for number, (source, known) in enumerate(zip(sources, compiled, strict=True)):
            columns = learned.trials[number], learned.hits[number], learned.logits[number]
            functions = self._call_back(source) if known is None else self._functions(known)
            records[number] = _SourceRecord(*functions, *[column.ctypes.data for column in columns])
        names = array("i", [SOURCE_NUMBERS[name] for name in name_sets([source.name for source in sources])])
        self._memory = records, learned, names
        places = ctypes.addressof(records), learned.weights.ctypes.data
        steps = decay, step, bias_step
        self._record = _BlendRecord(len(sources), *places, *steps, names.buffer_info()[0], learned.learns)
        self.address = ctypes.addressof(self._record)

    @property
    def text_end(self) -> list[int]:
        """The last tokens of the text, the root last."""
        return self._record.end_tokens[: self._record.end_length]  # type: ignore[no-any-return]

    @property
    def root(self) -> int:
        return self._record.end_tokens[self._record.end_length - 1]  # type: ignore[no-any-return]

    def move_end(self, tokens: Sequence[int]) -> None:
        """The text goes on with these tokens, which the sources have read."""
        self._room = 0
        added = array("i", tokens[-TAIL:])
        self.core.move_end(self.address, len(added), added.buffer_info()[0])

    def tree(self, tail: Sequence[int], budget: int, max_depth: int, min_value: float) -> DraftTree:
        """``tail``: the last tokens of the text, the root last."""
        self._record.end_length = 0
        self.move_end(tail)
        return propose_blends([self], [budget], max_depth, min_value)[0]

    def guesses(self, tail: Sequence[int], depth: int) -> list[tuple[int, int, list[int]]]:
        """All hinted tokens after a text, who hints at each (as bits), and the kind that each source gives to it."""
        text, count = array("i", tail), len(self._sources)
        room = count * MAX_HINTS
        columns = np.empty(room, np.int32), np.empty(room, np.int32), np.empty((room, count), np.int32)
        places = len(text), depth, room, *[column.ctypes.data for column in columns]
        size = self.core.blend_guesses(self.address, text.buffer_info()[0], *places)
        if size < 0:
            raise MemoryError("guesses after a text")
        return list(zip(*[column[:size].tolist() for column in columns], strict=True))

    def learn(self, tail: Sequence[int], emitted: Sequence[int]) -> None:
        text, after = array("i", tail), array("i", emitted)
        if self.core.blend_learn(self.address, text.buffer_info()[0], len(text), len(after), after.buffer_info()[0]):
            raise MemoryError("outcomes of a tree")

    def reserve(self, num_tokens: int) -> None:
        """Makes room for tokens that its sources are about to read."""
        self._room -= num_tokens
        if self._room < 0:
            self._room = RESERVED
            for reserve in self._reserve:
                reserve(num_tokens + RESERVED)

    def _functions(self, known: CompiledSource) -> tuple[int, int, int]:
        return self.core.address(known.look), self.core.address(known.follow) if known.follow else 0, known.address

    def _call_back(self, source: HintSource) -> tuple[int, int, int]:
        callback = _Look(_call(source.look))
        self._callbacks.append(callback)
        return ctypes.cast(callback, c_void_p).value or 0, 0, 0


def propose_blends(
    blends: Sequence[CompiledBlend], budgets: Sequence[int], max_depth: int, min_value: float
) -> list[DraftTree]:
    """Grows the trees of many requests. ``min_value``: nothing is added if the chance of its path is lower."""
    count, forest = len(blends), Forest(sum(budgets), len(blends))
    memory = array("q", [blend.address for blend in blends]), array("q", budgets)
    if blends[0].core.propose_blends(
        count,
        *[part.buffer_info()[0] for part in memory],
        max_depth,
        min_value,
        forest.capacity,
        forest.address,
        forest.probs_address,
        forest.places.buffer_info()[0],
        all(blend.follows for blend in blends),
    ):
        raise MemoryError(f"trees of {forest.capacity} nodes")
    return DraftTree.all_in(forest, repeat(""))


def observe_blends(
    blends: Sequence[CompiledBlend],
    tables: Sequence[CompiledTable],
    outcomes: Outcomes,
    first_rows: Sequence[int],
    ids: IdRows,
    scores: ScoreRows,
) -> None:
    """Learns from the verified trees of many requests: how good hints were, the rows of nodes, and what is now text.

    ``first_rows``: of the trees, in ``ids`` and ``scores [R, K]``.
    """
    for blend, emitted in zip(blends, outcomes.emitted, strict=True):
        blend.reserve(len(emitted))
    table_addresses = reserve_rows(tables, ids, scores)
    memory = array("q", [blend.address for blend in blends]), array("q", first_rows)
    kept = contiguous_rows(ids, scores)
    if blends[0].core.observe_blends(
        len(blends),
        memory[0].buffer_info()[0],
        table_addresses.buffer_info()[0],
        *outcomes.memory.arguments,
        memory[1].buffer_info()[0],
        *map(address_of, kept),
    ):
        raise IndexError(INVALID)


def name_sets(names: Sequence[str]) -> list[str]:
    """How trees name every set of sources, by its bits."""
    sets = ["+".join([name for bit, name in enumerate(names) if bits >> bit & 1]) for bits in range(1, 1 << len(names))]
    return [ROOT_SOURCE, *sets]


def _call(look: Callable[[Sequence[int], int], Hints | None]) -> Callable[..., None]:
    """A source in Python as C calls it."""

    def give(_: int, tail: Any, length: int, depth: int, into: Any) -> None:
        found = look(tail[:length], depth)
        if found is not None:
            record, count = into.contents, min(len(found.tokens), MAX_HINTS)
            record.count, record.absent = count, found.absent
            record.tokens[:count], record.kinds[:count] = found.tokens[:count], found.kinds[:count]

    return give
