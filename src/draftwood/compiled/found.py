"""What a draft model found by itself, as a tree or as hints: the functions of found.h."""

from __future__ import annotations

import ctypes
from array import array
from ctypes import c_int64, c_void_p

import numpy as np
import numpy.typing as npt

from draftwood.compiled.core import Core
from draftwood.targets import Found
from draftwood.tree import SOURCE_NUMBERS, DraftTree, Forest

Ints = npt.NDArray[np.int32]


class FoundRecord(ctypes.Structure):
    """``Found`` of found.h."""

    _fields_ = (
        ("records", c_void_p),
        *((name, c_int64) for name in ("stride", "num_passes", "num_trees", "tree", "width", "best")),
        ("names", c_void_p),
    )


def found_record(found: Found) -> FoundRecord:
    records, num_trees, tree, width, best, names = found
    place = records.ctypes.data, records.strides[0] // records.itemsize, len(records)
    return FoundRecord(*place, num_trees, tree, width, best, None if names is None else names.ctypes.data)


def build_found(
    core: Core, found: Found, size: int, wanted: Ints | None, root: int, source: str
) -> tuple[DraftTree, array[int]]:
    """The tree of the best ``size`` candidates, or of those in ``wanted`` that exist, in their order; and the
    candidates that its nodes below the root are."""
    forest, order = Forest(size + 1, 1), array("i", bytes(4 * size))
    record = found_record(found)
    count = core.found_tree(
        ctypes.addressof(record),
        size,
        None if wanted is None else wanted.ctypes.data,
        root,
        SOURCE_NUMBERS[source],
        forest.capacity,
        forest.address,
        forest.probs_address,
        order.buffer_info()[0],
    )
    if not count:
        raise MemoryError(f"a tree of {size} nodes")
    forest.place_first(count)
    (tree,) = DraftTree.all_in(forest, ("",))
    return tree, order[: count - 1]
