"""The compiled library of core.c and its functions.

Every function also exists in Python, which is the reference and the fallback without a compiler. Pointers are plain
addresses: the owner of the memory must keep it alive.
"""

import ctypes
from collections.abc import Callable
from ctypes import c_double, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy.typing as npt

from draftwood.disk import Library

MAX_THREADS = 8
CORE = Library("core", Path(__file__).parent / "core.c", ctypes.PyDLL)


class RowsRecord(ctypes.Structure):
    """``Rows`` of table.h."""

    _fields_ = (
        *((name, c_int64) for name in ("capacity", "used", "room", "oldest", "latest", "bits")),
        *((name, c_void_p) for name in ("slots", "keys", "older", "later", "ids", "scores")),
    )


class TableRecord(ctypes.Structure):
    """``Table`` of table.h."""

    _fields_ = (
        ("vocab", c_int64),
        ("width", c_int64),
        ("initial_ids", c_void_p),
        ("initial_scores", c_void_p),
        ("initial_stride", c_int64),
        ("tokens", RowsRecord),
        ("pairs", RowsRecord),
    )


class RulesRecord(ctypes.Structure):
    """``Rules`` of sizing.h; the next class is also from there."""

    _fields_ = (
        ("trust", c_double),
        ("prior_trials", c_double),
        ("prior_hits", c_double),
        ("min_rate", c_double),
        ("hope", c_double),
        ("fade", c_double),
        ("deep", c_int64),
        ("num_edges", c_int64),
        ("edges", c_double * 16),
    )


class ExperienceRecord(ctypes.Structure):
    _fields_ = (
        ("rules", c_void_p),
        ("request_decay", c_double),
        ("request_counts", c_void_p),
        ("drafter_decay", c_double),
        ("drafter_counts", c_void_p),
        ("last_was_right", c_int64),
    )


class Core:
    """The functions with their signatures; the headers document them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        def function(name: str, result: type | None, *arguments: type) -> Callable[..., Any]:
            entry = getattr(library, f"draftwood_{name}")
            entry.restype, entry.argtypes = result, arguments
            return entry  # type: ignore[no-any-return]

        self.find = function("find", c_int, c_void_p, c_int64, c_int64, c_void_p, c_void_p)
        self.learn = function("learn", c_int, c_void_p, c_int64, *[c_void_p] * 4)
        self.learn_tree = function(
            "learn_tree", c_int, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, *[c_void_p] * 3
        )
        self.find_full = function("find_full", c_int64, c_int64, c_void_p, c_int64, c_int64)
        self.extend_contexts = function("extend_contexts", None, c_int64, *[c_void_p] * 3)
        self.index_context = function("index_context", None, c_void_p)
        self.match = function("match", c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p)
        self.propose_spines = function("propose_spines", c_int, c_int64, c_void_p, c_void_p, c_int64, *[c_void_p] * 4)
        self.follow_spine = function("follow_spine", None, c_void_p, c_void_p, *(c_int64, c_void_p) * 2)
        self.observe_spines = function("observe_spines", c_int, c_int64, *[c_void_p] * 9)
        self.claim = function("claim", None, c_void_p, c_int64, c_void_p, c_void_p)
        self.order = function("order", None, c_void_p, c_void_p)
        self.rehash = function("rehash", None, c_void_p)
        context = (c_void_p, c_int64, c_int64)
        spine = (c_int64, c_void_p, c_void_p)
        limits = (c_int64, c_void_p, c_int64, c_int64, c_double)
        self.spine_tree = function("spine_tree", c_int64, *context, *spine, *limits, c_void_p, c_void_p)
        self.chances = function("chances", None, c_void_p, c_void_p, c_void_p)
        costs = (c_double, c_void_p, c_double, c_double)
        self.cut = function("cut", c_int, c_int64, *[c_void_p] * 6, *costs, c_int64, *[c_void_p] * 6)
        self.note = function("note", None, c_int64, *[c_void_p] * 4)
        self.accept = function("accept", None, c_int64, *[c_void_p] * 6)
        self.tally = function("tally", None, c_int64, *[c_void_p] * 7)
        self.add_places = function("add_places", None, c_void_p, c_int64, c_void_p)
        self.index_places = function("index_places", None, c_void_p)
        verified = (c_int64, *[c_void_p] * 3, c_int64, c_void_p, c_int64)
        self.note_positions = function("note_positions", c_int, c_void_p, *verified, c_int64, c_void_p, c_void_p)
        self.add_drafted = function("add_drafted", None, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p)
        grown = (c_int64, c_double, c_int64, *[c_void_p] * 3)
        self.propose_blends = function("propose_blends", c_int, c_int64, *[c_void_p] * 2, *grown, c_int64)
        self.observe_blends = function("observe_blends", c_int, c_int64, *[c_void_p] * 10)
        self.move_end = function("move_end", None, c_void_p, c_int64, c_void_p)
        self.blend_guesses = function("blend_guesses", c_int64, c_void_p, c_void_p, *[c_int64] * 3, *[c_void_p] * 3)
        self.blend_learn = function("blend_learn", c_int, c_void_p, c_void_p, c_int64, c_int64, c_void_p)
        follow = (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_double)
        self.follow_texts = function("follow_texts", c_int, c_int64, *follow, *[c_void_p] * 3)
        found = (c_void_p, c_int64, c_void_p, c_int64, c_int64)
        self.found_tree = function("found_tree", c_int64, *found, c_int64, *[c_void_p] * 3)
        self.add_found = function("add_found", None, c_void_p, c_void_p, c_int64, c_void_p)
        self._library = library
        self.set_threads = function("set_threads", None, c_int64)

    def address(self, name: str) -> int:
        """Address of a function that C calls."""
        return ctypes.cast(getattr(self._library, f"draftwood_{name}"), c_void_p).value or 0


def address_of(array: npt.NDArray[Any]) -> int:
    """Address of a new array's memory; three times as fast as ``array.ctypes.data``."""
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))


_loaded: tuple[ctypes.CDLL, Core] | None = None
_num_threads = 1


def load_core() -> Core | None:
    """Load the functions; None if there is no compiler, and Python must be used."""
    global _loaded
    library = CORE.load()
    if library is None:
        return None
    if _loaded is None or _loaded[0] is not library:
        _loaded = library, Core(library)
        _loaded[1].set_threads(_num_threads)
    return _loaded[1]


def set_threads(count: int) -> None:
    """For the drafts of batches, whichever engine they belong to."""
    global _num_threads
    _num_threads = min(count, MAX_THREADS)
    if _loaded is not None:
        _loaded[1].set_threads(_num_threads)
