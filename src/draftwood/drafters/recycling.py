"""Token recycling: a static tree filled with the top successors from earlier passes."""

from dataclasses import dataclass

from draftwood.drafters.base import DraftRequest
from draftwood.drafters.checks import check_choice, check_flag, check_int
from draftwood.drafters.shapes import static_tree, truncate_shape
from draftwood.drafters.transition import HARVESTS, TransitionDrafter
from draftwood.growth import fill, lookup_candidates
from draftwood.tree import DraftTree, TreeShape


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclingOptions:
    top_k: int = 8  # successors kept per token
    tree: str = "heuristic"  # or a JSON file
    harvest: str = "all"  # learn from every verified node, or only from "accepted" ones
    bigrams: bool = False  # whether successors of token pairs are kept, besides those of single tokens
    static: bool = True  # start from the successor table of the model, if `draftwood tune` has built one
    table_megabytes: int = 128  # memory for token pairs

    def __post_init__(self) -> None:
        check_int(self, 1, "top_k")
        check_int(self, 1, "table_megabytes", high=1 << 20)
        check_choice(self, "harvest", HARVESTS)
        check_flag(self, "bigrams", "static")
        static_tree(self.tree)


class RecyclingDrafter(TransitionDrafter):
    name = "recycling"
    summary = "Token recycling: a static tree filled with the best successors seen in earlier passes"
    guesses_from = "logits of earlier passes"
    tree_shape = "static"
    Options = RecyclingOptions

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self._shape: TreeShape = static_tree(self.options.tree)
        self._candidates = lookup_candidates(self.memory.successors)

    def propose(self, budget: int) -> DraftTree:
        return fill(truncate_shape(self._shape, budget), self.anchor, self._candidates, "branch")
