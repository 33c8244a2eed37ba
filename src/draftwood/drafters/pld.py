"""Prompt lookup decoding: copy what followed an earlier occurrence of the last tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftwood.compiled import extend_contexts
from draftwood.drafters.base import Drafter, DraftRequest, VerifiedBatch, VerifiedTree
from draftwood.drafters.checks import check_int, check_ngrams
from draftwood.sources import CompiledContextMatch, new_context
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
    wants_logits = False
    can_rest = True

    def begin(self, request: DraftRequest) -> None:
        options = self.options
        self._context = new_context(range(options.min_ngram, options.max_ngram + 1))
        self._context.extend(request.known_text)
        self.learns_in_batch = isinstance(self._context, CompiledContextMatch)

    def propose(self, budget: int) -> DraftTree:
        root = self._context.last
        match = self._context.match(min(self.options.max_draft, budget - 1)) if budget > 1 else None
        if match is None:
            return DraftTree.root_only(root)
        return DraftTree.chain([root, *match.tokens], "context", [1.0, *match.trust()])

    @classmethod
    def observe_batch(cls, drafters: Sequence["PromptLookupDrafter"], verified: VerifiedBatch) -> None:
        contexts = [each.index for drafter in drafters if isinstance(each := drafter._context, CompiledContextMatch)]
        extend_contexts(contexts, verified.outcomes)

    def observe(self, verified: VerifiedTree) -> None:
        self._context.extend(verified.emitted)

    def skip(self, token_ids: Sequence[int]) -> None:
        self._context.extend(token_ids)
