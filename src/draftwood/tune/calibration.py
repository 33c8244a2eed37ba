"""How well a drafter knows its chances: the expected and the real acceptance of its nodes, given their parents."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood.tree import DraftTree

NUM_BINS = 10  # of the expected chance


class Reliability(NamedTuple):
    """Nodes that were tried, the sum of their expected chances, and how many were accepted."""

    tried: int
    expected: float
    accepted: int

    @property
    def expected_rate(self) -> float:
        return self.expected / self.tried if self.tried else 0.0

    @property
    def accepted_rate(self) -> float:
        return self.accepted / self.tried if self.tried else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {"tried": self.tried, "expected": round(self.expected_rate, 4), "accepted": round(self.accepted_rate, 4)}


class Calibration:
    """Counts the nodes of verified trees whose parent was accepted, by their chance and by their source."""

    def __init__(self) -> None:
        self._bins: npt.NDArray[np.float64] = np.zeros((NUM_BINS, 3))
        self._sources: dict[str, list[float]] = {}

    def note(self, tree: DraftTree, path: Sequence[int], num_emitted: int) -> None:
        """``path``: accepted nodes, root first. Outcomes after the last emitted token are not known."""
        reached = set(path[:num_emitted])
        accepted = set(path)
        for node in range(1, len(tree)):
            if tree.parents[node] in reached:
                chance = tree.probs[node]
                row = (1.0, chance, float(node in accepted))
                self._bins[min(int(chance * NUM_BINS), NUM_BINS - 1)] += row
                own = self._sources.setdefault(tree.sources[node], [0.0, 0.0, 0.0])
                own[:] = [known + new for known, new in zip(own, row, strict=True)]

    @property
    def bins(self) -> list[Reliability]:
        """By chance, in steps of 1 / NUM_BINS."""
        return [_reliability(row) for row in self._bins.tolist()]

    @property
    def sources(self) -> dict[str, Reliability]:
        return {name: _reliability(row) for name, row in sorted(self._sources.items())}

    @property
    def total(self) -> Reliability:
        return _reliability(self._bins.sum(axis=0).tolist())

    @property
    def error(self) -> float:
        """The expected calibration error: the mean distance of expected from real acceptance, over bins."""
        tried, expected, accepted = self._bins.T
        return float(np.abs(expected - accepted).sum() / max(tried.sum(), 1.0))


def _reliability(row: Sequence[float]) -> Reliability:
    return Reliability(round(row[0]), row[1], round(row[2]))
