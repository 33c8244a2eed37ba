"""Trees whose shape does not depend on the source of a guess: baselines for the spine tree of GOOSE.

They use the same candidates as GOOSE, first the copied token, then the best successors: k children at every node, or
the tree that Sequoia's dynamic program finds for the acceptance rates by rank.
"""

from abc import abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from draftwood.drafters.base import DraftRequest, VerifiedTree
from draftwood.drafters.checks import check_choice, check_flag, check_int, check_ngrams
from draftwood.drafters.shapes import static_tree, truncate_shape
from draftwood.drafters.transition import HARVESTS, TransitionDrafter
from draftwood.errors import OptionError
from draftwood.growth import Candidates, fill, fill_breadth_first, lookup_candidates, spine_candidates
from draftwood.sources import new_context
from draftwood.tree import DraftTree, TreeShape, sequoia


@dataclass(frozen=True, kw_only=True, slots=True)
class IsotropicOptions:
    spine: bool = True  # False: successors only
    min_ngram: int = 3  # shortest n-gram to look up
    max_ngram: int = 5  # longest n-gram to look up
    max_draft: int = 20  # maximum number of copied tokens
    top_k: int = 10  # successors kept per context
    bigrams: bool = True  # whether successors of token pairs are kept, besides those of single tokens
    harvest: str = "all"  # learn from every verified node, or only from "accepted" ones
    static: bool = True  # start from the successor table of the model, if `draftwood tune` has built one
    table_megabytes: int = 128  # memory for token pairs

    def __post_init__(self) -> None:
        check_ngrams(self)
        check_int(self, 1, "max_draft", "top_k", "table_megabytes")
        check_choice(self, "harvest", HARVESTS)
        check_flag(self, "spine", "bigrams", "static")


class RankedDrafter(TransitionDrafter):
    """Ranks the copied token before the successors; ``grow`` builds the tree from these candidates."""

    guesses_from = "the text so far, and logits of earlier passes"
    copies_text = True
    Options = IsotropicOptions

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self._context = new_context(range(self.options.min_ngram, self.options.max_ngram + 1))
        self._context.extend(request.known_text)
        self._branches = lookup_candidates(self.memory.successors)

    @abstractmethod
    def grow(self, candidates: Candidates, budget: int, route: str) -> DraftTree: ...

    def propose(self, budget: int) -> DraftTree:
        match = self._context.match(self.options.max_draft) if self.options.spine else None
        candidates = spine_candidates(match.tokens, match.trust(), self._branches) if match else self._branches
        return self.grow(candidates, budget, "spine" if match else "branch")

    def observe(self, verified: VerifiedTree) -> None:
        self._context.extend(verified.emitted)
        super().observe(verified)


class UniformDrafter(RankedDrafter):
    arity: ClassVar[int]

    def grow(self, candidates: Candidates, budget: int, route: str) -> DraftTree:
        return fill_breadth_first(self.anchor, candidates, self.arity, budget, route)


class Iso3Drafter(UniformDrafter):
    name = "iso3"
    summary = "Three children per node, level by level, from the same candidates as goose"
    tree_shape = "3 children per node"
    arity = 3


class Iso5Drafter(UniformDrafter):
    name = "iso5"
    summary = "Five children per node, level by level, from the same candidates as goose"
    tree_shape = "5 children per node"
    arity = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class SequoiaOptions(IsotropicOptions):
    acceptance: str = "0.53,0.11,0.05,0.03,0.02,0.015,0.01,0.01,0.01,0.005"  # rate of rank 0, 1, ... given the parent
    max_depth: int = 20  # maximum number of levels below the root
    tree: str | None = None  # use this tree instead: a JSON file of `draftwood tune --static-tree`

    def __post_init__(self) -> None:
        IsotropicOptions.__post_init__(self)
        check_int(self, 1, "max_depth")
        parse_acceptance(self.acceptance)
        if self.tree is not None:
            static_tree(self.tree)


class SequoiaDrafter(RankedDrafter):
    name = "sequoia"
    summary = "The best static tree for given acceptance rates by rank, from the same candidates as goose"
    tree_shape = "static, computed by Sequoia's dynamic program"
    Options = SequoiaOptions

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self._measured = None if self.options.tree is None else static_tree(self.options.tree)

    def grow(self, candidates: Candidates, budget: int, route: str) -> DraftTree:
        options = self.options
        if self._measured is None:
            shape = _sequoia(options.acceptance, budget, options.max_depth)
        else:
            shape = truncate_shape(self._measured, budget)
        return fill(shape, self.anchor, candidates, route)


def parse_acceptance(text: object) -> tuple[float, ...]:
    """Parse ``0.5,0.1,0.05``: how often the best, second and third candidate is right."""
    try:
        vector = tuple(float(part) for part in str(text).split(","))
    except ValueError:
        vector = ()
    if not vector or not all(value >= 0.0 for value in vector) or sum(vector) > 1.0 + 1e-9:  # also rejects NaN
        raise OptionError(
            "acceptance is not a list of probabilities",
            got=repr(text),
            allowed="rates by rank such as 0.5,0.1,0.05: none negative, at most 1 in total",
        )
    return vector


@lru_cache(maxsize=64)
def _sequoia(acceptance: str, budget: int, max_depth: int) -> TreeShape:
    return sequoia(parse_acceptance(acceptance), budget, max_depth)[0]
