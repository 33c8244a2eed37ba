"""Options of drafters with a draft model, and what one of them does to its probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from draftwood.drafters.checks import check_choice, check_flag, check_fraction, check_int
from draftwood.drafters.shapes import static_tree
from draftwood.errors import OptionError
from draftwood.growth.neural import GROWTHS, GrowthOptions
from draftwood.targets import MAX_TOP_K

MAX_NODES = 128  # nodes per tree, and nodes that a draft model runs for it


@dataclass(frozen=True, kw_only=True, slots=True)
class NeuralOptions:
    growth: str = "beam"  # "beam", "optimal", "salf" (stops early), "chain" or "static" (the shape of `tree`)
    depth: int = 0  # levels below the root; 0: up to 7 for chain and beam, no limit for the others
    top_k: int = 10  # candidate children per node; for `beam` also the nodes expanded per level
    batch: int = 10  # `optimal`, `salf`: nodes expanded per draft pass
    threshold: float = 0.4  # `salf`: stop when the expected tokens of another draft pass fall below this
    sharpen: float = 1.0  # greedy requests: temperature at which path probabilities are computed; below 1: sharper
    tree: str = "heuristic"  # `static`: name or file of the shape
    draw: bool = False  # when sampling: draw children instead of choosing the best
    support: int = 64  # `draw`: number of best tokens that children are drawn from

    def __post_init__(self) -> None:
        check_choice(self, "growth", GROWTHS)
        check_int(self, 0, "depth", high=MAX_NODES)
        check_int(self, 1, "top_k", "batch", "support", high=MAX_TOP_K)
        check_fraction(self, "threshold")
        if isinstance(self.sharpen, bool) or not isinstance(self.sharpen, (int, float)) or not 0.1 <= self.sharpen <= 1:
            raise OptionError("sharpen must be a temperature", got=repr(self.sharpen), allowed="0.1 to 1")
        check_flag(self, "draw")
        static_tree(self.tree)

    def growth_options(self) -> GrowthOptions:
        shape = static_tree(self.tree) if self.growth == "static" else None
        return GrowthOptions(
            depth=self.depth or None,
            top_k=self.top_k,
            batch=self.batch,
            threshold=self.threshold,
            shape=shape.limit_depth(self.depth) if shape is not None and self.depth else shape,
            support=self.support,
        )


def sharpen_probs(probs: npt.NDArray[np.float32], temperature: float) -> npt.NDArray[np.float32]:
    """Return the probabilities [n, k] of the top tokens at a temperature below 1.

    The mass of all other tokens counts as tokens that are as likely as the last of the top ones."""
    power = np.float32(1.0 / temperature)
    sharper = probs**power
    rest = np.maximum(1.0 - probs.sum(axis=1), 0.0) * probs[:, -1] ** (power - 1.0)  # [n]
    total = np.maximum(sharper.sum(axis=1) + rest, np.finfo(np.float32).tiny)
    return np.asarray(sharper / total[:, None], dtype=np.float32)
