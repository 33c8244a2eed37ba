"""Trees that a draft model grows by itself, all passes in one launch: what it is asked for, and what it returns."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class BeamPlan(NamedTuple):
    """A beam search: each pass runs the best nodes of the level that the last one predicted."""

    width: int  # nodes that a pass runs per tree
    best: int  # candidates after a node
    passes: int  # after the one over the text, whose last token is the root

    @property
    def num_nodes(self) -> int:
        """Nodes below the root that are run."""
        return self.width * self.passes


class Beam(NamedTuple):
    """What the passes of one tree found.

    Nodes are those that were run: 0 is the root, ``pass * width + place`` are the others. Candidate ``node * best +
    rank`` is the token of that rank after a node. The arrays are views that the next beam overwrites.
    """

    tokens: npt.NDArray[np.int32]  # [candidates]
    probs: npt.NDArray[np.float32]  # [candidates] given the node; 0: there is none
    values: npt.NDArray[np.float32]  # [candidates] probability of the path from the root
    picks: npt.NDArray[np.int32]  # [nodes] the candidate that a node is; negative: the root, or no node
