"""One tree from several sources, in C: owns the memory of what is learned and calls the functions of blend.h."""

import ctypes
from array import array
from collections.abc import Callable, Sequence
from ctypes import c_double, c_int32, c_int64, c_void_p
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from draftwood.compiled.core import Core
from draftwood.tree import DraftTree

TAIL, MAX_SOURCES, MAX_HINTS, NUM_DEPTHS, NUM_BINS = 32, 8, 64, 3, 20  # as in blend.h and hints.h
NONE = -1

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

    def compiled(self) -> tuple[str, int] | None:
        """The function of hints.h that gives the same hints, and the address of its data; None if there is none."""


class Learned:
    """What drafting has taught about the sources of a blend; requests share it."""

    def __init__(self, priors: Sequence[tuple[Sequence[float], float]]) -> None:
        """``priors``: by source, the rates of its kinds and how many trials they count as."""
        rates = [np.array(own, np.float64) for own, _ in priors]
        self.trials: list[Floats] = [np.full(len(own), trials) for own, trials in priors]
        self.hits: list[Floats] = [own * trials for own, trials in zip(rates, self.trials, strict=True)]
        self.logits: list[Floats] = [np.log(own / (1.0 - own)) for own in rates]
        count = len(rates)
        self.weights: Floats = np.zeros((NUM_DEPTHS, 1 << count, count + 1))  # bias first
        for informed in range(1, 1 << count):
            chosen = [source for source in range(count) if informed >> source & 1]
            # Two sources that agree are surer than one, but their evidence overlaps.
            self.weights[:, informed, [source + 1 for source in chosen]] = 1.0 if len(chosen) == 1 else 0.6
        self.bins: Floats = np.zeros((NUM_BINS, 3))  # by chance: guesses, sum of their chances, hits


class _HintsRecord(ctypes.Structure):
    _fields_ = (
        ("count", c_int64),
        ("tokens", c_int32 * MAX_HINTS),
        ("kinds", c_int32 * MAX_HINTS),
        ("absent", c_int32),
    )


class _SourceRecord(ctypes.Structure):
    _fields_ = (("look", c_void_p), ("data", c_void_p), ("trials", c_void_p), ("hits", c_void_p), ("logits", c_void_p))


class _BlendRecord(ctypes.Structure):
    _fields_ = (
        ("num_sources", c_int64),
        ("sources", c_void_p),
        ("weights", c_void_p),
        ("bins", c_void_p),
        ("decay", c_double),
        ("step", c_double),
        ("bias_step", c_double),
    )


_Look = ctypes.CFUNCTYPE(None, c_void_p, ctypes.POINTER(c_int32), c_int64, c_int64, ctypes.POINTER(_HintsRecord))


class CompiledBlend:
    """Grows the trees of one request."""

    def __init__(
        self, core: Core, sources: Sequence[HintSource], learned: Learned, decay: float, step: float, bias_step: float
    ) -> None:
        self._core = core
        self._sources = sources
        self._callbacks: list[Any] = []  # kept alive
        records = (_SourceRecord * len(sources))()
        for number, source in enumerate(sources):
            look, data = self._function(source)
            columns = learned.trials[number], learned.hits[number], learned.logits[number]
            records[number] = _SourceRecord(look, data, *[column.ctypes.data for column in columns])
        self._memory = records, learned
        places = ctypes.addressof(records), learned.weights.ctypes.data, learned.bins.ctypes.data
        self._record = _BlendRecord(len(sources), *places, decay, step, bias_step)
        self.address = ctypes.addressof(self._record)

    def grow(
        self, tail: Sequence[int], budget: int, max_depth: int, min_value: float
    ) -> tuple[list[list[int]], list[float]]:
        """Tokens, parents, depths and sources (as bits) of the nodes, and their chances given the parent."""
        text = array("i", tail)
        nodes, chances = array("i", bytes(4 * 4 * budget)), array("d", bytes(8 * budget))
        size = self._core.blend_tree(
            self.address,
            text.buffer_info()[0],
            len(text),
            budget,
            max_depth,
            min_value,
            nodes.buffer_info()[0],
            chances.buffer_info()[0],
        )
        if not size:
            raise MemoryError(f"a tree of {budget} nodes")
        return [nodes[start : start + size].tolist() for start in range(0, 4 * budget, budget)], chances[:size].tolist()

    def learn(self, tail: Sequence[int], emitted: Sequence[int]) -> None:
        text, after = array("i", tail), array("i", emitted)
        if self._core.blend_learn(self.address, text.buffer_info()[0], len(text), len(after), after.buffer_info()[0]):
            raise MemoryError("outcomes of a tree")

    def _function(self, source: HintSource) -> tuple[int, int]:
        known = source.compiled()
        if known is not None:
            return self._core.address(known[0]), known[1]
        callback = _Look(_call(source.look))
        self._callbacks.append(callback)
        return ctypes.cast(callback, c_void_p).value or 0, 0


def _call(look: Callable[[Sequence[int], int], Hints | None]) -> Callable[..., None]:
    """A source in Python as C calls it."""

    def give(_: int, tail: Any, length: int, depth: int, into: Any) -> None:
        found = look(tail[:length], depth)
        if found is not None:
            record, count = into.contents, min(len(found.tokens), MAX_HINTS)
            record.count, record.absent = count, found.absent
            record.tokens[:count], record.kinds[:count] = found.tokens[:count], found.kinds[:count]

    return give
