"""Prompt lookup decoding: copy what followed an earlier occurrence of the last tokens."""

from dataclasses import dataclass

from draftwood.drafters.base import Drafter, DraftRequest, VerifiedTree
from draftwood.drafters.checks import check_int, check_ngrams
from draftwood.sources import ContextMatch
from draftwood.tree import DraftTree


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLookupOptions:
    max_ngram: int = 3  # longest n-gram to look up
    min_ngram: int = 1  # shortest n-gram to look up
    max_draft: int = 20  # maximum number of copied tokens

    def __post_init__(self) -> None:
        check_ngrams(self)
        check_int(self, 1, "max_draft")


class PromptLookupDrafter(Drafter):
    name = "pld"
    summary = "Prompt lookup: copies what followed the latest match of the longest n-gram"
    guesses_from = "the text so far"
    tree_shape = "chain"
    copies_text = True
    Options = PromptLookupOptions

    def begin(self, request: DraftRequest) -> None:
        options = self.options
        self._context = ContextMatch(range(options.min_ngram, options.max_ngram + 1))
        self._context.extend(request.known_text)

    def propose(self, budget: int) -> DraftTree:
        root = self._context.tokens[-1]
        match = self._context.match(min(self.options.max_draft, budget - 1)) if budget > 1 else None
        if match is None:
            return DraftTree.root_only(root)
        return DraftTree.chain([root, *match.tokens], "context", [1.0, *match.trust()])

    def observe(self, verified: VerifiedTree) -> None:
        self._context.extend(verified.emitted)
