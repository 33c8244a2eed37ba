"""How well a drafter knows its chances: the expected and the real acceptance of its nodes, given their parents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NUM_BINS = 10  # of the expected chance; also in compiled/trees.h

Floats = npt.NDArray[np.float64]


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
    """Counts of nodes whose parent was accepted, by source and by chance."""

    def __init__(self) -> None:
        self._counts: dict[str, Floats] = {}  # by source: [NUM_BINS, 3] tried, sum of chances, accepted

    def add(self, source: str, counts: Floats) -> None:
        """``counts [NUM_BINS, 3]``: nodes tried, the sum of their chances, nodes accepted."""
        known = self._counts.get(source)
        self._counts[source] = counts.copy() if known is None else known + counts

    @property
    def bins(self) -> list[Reliability]:
        """By chance, in steps of 1 / NUM_BINS."""
        return [_reliability(row) for row in self._sum()]

    @property
    def sources(self) -> Mapping[str, Reliability]:
        return {name: _reliability(counts.sum(axis=0)) for name, counts in sorted(self._counts.items())}

    @property
    def total(self) -> Reliability:
        return _reliability(self._sum().sum(axis=0))

    @property
    def error(self) -> float:
        """The expected calibration error: the mean distance of expected from real acceptance, over bins."""
        return _error(self._sum())

    def error_of(self, source: str) -> float:
        return _error(self._counts[source])

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; bins and sources without nodes are left out."""
        return {
            "error": round(self.error, 4),
            **self.total.as_dict(),
            "bins": [
                {"from": number / NUM_BINS, "to": (number + 1) / NUM_BINS, **own.as_dict()}
                for number, own in enumerate(self.bins)
                if own.tried
            ],
            "sources": {
                name: {"error": round(self.error_of(name), 4), **own.as_dict()} for name, own in self.sources.items()
            },
        }

    def _sum(self) -> Floats:
        return sum(self._counts.values(), np.zeros((NUM_BINS, 3)))


def _error(counts: Floats) -> float:
    tried, expected, accepted = counts.T
    return float(np.abs(expected - accepted).sum() / max(tried.sum(), 1.0))


def _reliability(row: Floats) -> Reliability:
    tried, expected, accepted = row.tolist()
    return Reliability(round(tried), expected, round(accepted))
