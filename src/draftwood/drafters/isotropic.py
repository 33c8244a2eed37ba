"""Trees whose shape does not care where a guess comes from: the baselines that a spine tree is measured against.

They take the candidates GOOSE takes, the copied token first and the best successors after it: k of them at every node,
or as many as Sequoia's programme makes of the acceptance by rank.
"""

from __future__ import annotations

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
from draftwood.sources import ContextMatch
from draftwood.tree import DraftTree, TreeShape, sequoia


@dataclass(frozen=True, kw_only=True, slots=True)
class IsotropicOptions:
    spine: bool = True  # False: successors alone
    min_ngram: int = 3
    max_ngram: int = 5
    max_draft: int = 20
    top_k: int = 10
    bigrams: bool = True
    harvest: str = "all"
    static: bool = True
    table_megabytes: int = 128

    def __post_init__(self) -> None:
        check_ngrams(self)
        check_int(self, 1, "max_draft", "top_k", "table_megabytes")
        check_choice(self, "harvest", HARVESTS)
        check_flag(self, "spine", "bigrams", "static")


class RankedDrafter(TransitionDrafter):
    """Ranks copied tokens before successors; ``grow`` puts them into a tree."""

    guesses_from = "the text so far, and logits of earlier passes"
    copies_text = True
    Options = IsotropicOptions

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self._context = ContextMatch(range(self.options.min_ngram, self.options.max_ngram + 1))
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
    acceptance: str = "0.53,0.11,0.05,0.03,0.02,0.015,0.01,0.01,0.01,0.005"  # of rank 0, 1, ... given the parent
    max_depth: int = 20
    tree: str | None = None  # a JSON file instead, as `draftwood tune --static-tree` writes it

    def __post_init__(self) -> None:
        IsotropicOptions.__post_init__(self)
        check_int(self, 1, "max_depth")
        acceptance_vector(self.acceptance)
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


def acceptance_vector(text: object) -> tuple[float, ...]:
    """``0.5,0.1,0.05``: how often the best, the second, the third candidate is the right one."""
    try:
        vector = tuple(float(part) for part in str(text).split(","))
    except ValueError:
        vector = ()
    if not vector or not all(value >= 0.0 for value in vector) or sum(vector) > 1.0 + 1e-9:  # nor nan
        raise OptionError(
            "acceptance is no row of probabilities",
            got=repr(text),
            allowed="as in 0.5,0.1,0.05: by rank, none negative, no more than 1 in all",
        )
    return vector


@lru_cache(maxsize=64)
def _sequoia(acceptance: str, budget: int, max_depth: int) -> TreeShape:
    return sequoia(acceptance_vector(acceptance), budget, max_depth)[0]
