"""What defines a growth."""

from dataclasses import dataclass
from typing import NamedTuple

from draftwood.growth.drawn import Draw, choose_best
from draftwood.tree import TreeShape


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthOptions:
    """Options of all policies; each reads its own."""

    depth: int | None = None  # levels below the root; None: 7 for `chain` and `beam`, no limit for the others
    top_k: int = 10  # candidate children per node; for `beam` also the nodes expanded per level
    batch: int = 10  # `optimal`, `salf`: nodes expanded per draft pass
    threshold: float = 0.4  # `salf`: the sum of path probabilities below which a draft pass is not worth it
    shape: TreeShape | None = None  # `static`
    support: int = 64  # drawn: number of best tokens that children are drawn from
    hit: float = 0.7  # drawn: acceptance rate of a child if its parent is accepted and earlier siblings are not


class GrowthSpec(NamedTuple):
    """Everything that defines a growth besides its policy."""

    root: int
    budget: int  # nodes, the root included
    options: GrowthOptions
    draw: Draw = choose_best  # belongs to one request
    tag: str = "draft"  # source name of all nodes but the root
