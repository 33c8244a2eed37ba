"""Trees that a draft model grows by itself, without the host between passes: what it is asked for, what it returns."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class SearchLimits(NamedTuple):
    """Of one tree."""

    size: int  # nodes below the root
    depth: int  # levels below the root
    picks: Sequence[int] = ()  # in place of the best: by node below the root, the candidate that is run; -1: none


class SearchPlan(NamedTuple):
    """Each pass runs the best candidates that the passes before it predicted.

    Nodes are those that are run: 0 is the root, ``pass * width + place`` are the others. Candidate ``node * best +
    rank`` is the token of that rank after a node.
    """

    width: int  # nodes that a pass runs per tree
    best: int  # candidates after a node
    passes: int  # at most, after the one over the text, whose last token is the root
    limits: Sequence[SearchLimits]  # one per tree
    anywhere: bool = False  # a pass runs the best of all candidates, not of the last level, that could have a child in
    # the tree
    threshold: float | None = None  # stop when the values of the nodes to run sum to less in every tree, or to nothing
    is_fixed: bool = False  # a pass runs the picks of the limits


class Found(NamedTuple):
    """What the passes of one tree found. All arrays are numbered like the plan's nodes and candidates."""

    tokens: npt.NDArray[np.int32]  # [candidates]
    probs: npt.NDArray[np.float32]  # [candidates] given the node; 0: there is none
    values: npt.NDArray[np.float32]  # [candidates] probability of the path from the root
    picks: npt.NDArray[np.int32]  # [nodes] the candidate that a node is; negative: the root, or no node
    depths: npt.NDArray[np.int32]  # [nodes] levels below the root

    def parents(self, plan: SearchPlan) -> list[int]:
        """Of the nodes that were run, as those of a pending tree, in the order of passes; -1: follows the text."""
        nodes: list[int] = np.maximum(self.picks[plan.width :] // plan.best - plan.width, -1).tolist()
        return nodes
