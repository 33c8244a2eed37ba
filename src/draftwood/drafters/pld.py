"""Prompt lookup: copy what followed the last tokens when they occurred before."""

from __future__ import annotations

from dataclasses import dataclass

from draftwood.drafters.base import Drafter, DraftRequest, Verified
from draftwood.errors import OptionError
from draftwood.growth.chain import chain
from draftwood.sources.context import ContextMatch
from draftwood.tree import DraftTree


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLookupOptions:
    max_ngram: int = 3  # longest run of last tokens to look for
    min_ngram: int = 1
    max_draft: int = 20  # tokens copied at most

    def __post_init__(self) -> None:
        if not all(isinstance(value, int) for value in (self.max_ngram, self.min_ngram, self.max_draft)):
            raise OptionError("pld counts in whole numbers", got=self)
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise OptionError(
                "pld needs 1 <= min_ngram <= max_ngram", got=f"min_ngram {self.min_ngram}, max_ngram {self.max_ngram}"
            )
        if self.max_draft < 1:
            raise OptionError("pld must copy at least one token", got=f"max_draft {self.max_draft}")


class PromptLookupDrafter(Drafter):
    """`pld`: the latest occurrence of the longest matching n-gram, verified as a chain."""

    name = "pld"
    Options = PromptLookupOptions

    def begin(self, request: DraftRequest) -> None:
        options = self.options
        self._context = ContextMatch(range(options.min_ngram, options.max_ngram + 1))
        self._context.extend(request.prompt_ids)

    def propose(self, budget: int) -> DraftTree:
        match = self._context.match(self.options.max_draft)
        return chain(self._context.tokens[-1], match.tokens if match else (), "context", budget)

    def observe(self, verified: Verified) -> None:
        self._context.extend(verified.emitted)
