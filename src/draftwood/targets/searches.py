"""Trees that a draft model grows by itself, without the host between passes: what it is asked for, what it returns."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]


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
    """What the passes of one tree found, as they recorded it for all trees. A record holds the tokens, the
    probabilities and the values of candidates, then the picks and the depths of nodes, each for all trees.

    Records lie in the memory of the search, so they are valid until its next run.
    """

    records: Ints  # [passes, 3 * trees * width * best + 2 * trees * width]; floats by their bits
    num_trees: int
    tree: int
    width: int
    best: int
    names: Ints | None = None  # tokens, by the numbers that are recorded; None: these are tokens

    @property
    def tokens(self) -> Ints:
        """[candidates]"""
        numbers = self._of_candidates(0)
        return numbers if self.names is None else self.names[numbers]

    @property
    def probs(self) -> Floats:
        """[candidates] Given the node; 0: there is none."""
        return self._of_candidates(1).view(np.float32)

    @property
    def values(self) -> Floats:
        """[candidates] Probability of the path from the root."""
        return self._of_candidates(2).view(np.float32)

    @property
    def picks(self) -> Ints:
        """[nodes] The candidate that a node is; negative: the root, or no node."""
        return self._of_nodes(0)

    @property
    def depths(self) -> Ints:
        """[nodes] Levels below the root."""
        return self._of_nodes(1)

    def parents(self, plan: SearchPlan) -> list[int]:
        """Of the nodes that were run, as those of a pending tree, in the order of passes; -1: follows the text."""
        nodes: list[int] = np.maximum(self.picks[plan.width :] // plan.best - plan.width, -1).tolist()
        return nodes

    def _of_candidates(self, part: int) -> Ints:
        group = self.width * self.best
        return self._columns((part * self.num_trees + self.tree) * group, group)

    def _of_nodes(self, part: int) -> Ints:
        return self._columns(((3 * self.best + part) * self.num_trees + self.tree) * self.width, self.width)

    def _columns(self, first: int, count: int) -> Ints:
        """A copy, one record after the other."""
        return np.ascontiguousarray(self.records[:, first : first + count]).reshape(-1)
