"""Prompt lookup decoding: copy what followed an earlier occurrence of the last tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from draftwood.compiled import extend_contexts
from draftwood.drafters.base import DraftRequest, VerifiedBatch
from draftwood.drafters.checks import check_flag, check_int, check_ngrams
from draftwood.drafters.copying import CopyingDrafter
from draftwood.sources import CompiledContextMatch, ContextMatch, new_context
from draftwood.tree import DraftTree


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLookupOptions:
    max_ngram: int = 3  # longest n-gram to look up
    min_ngram: int = 1  # shortest n-gram to look up
    max_draft: int = 20  # maximum number of copied tokens
    earlier_answers: bool = False  # also draft from finished answers to the same prompt; see `memory`

    def __post_init__(self) -> None:
        check_ngrams(self)
        check_int(self, 1, "max_draft")
        check_flag(self, "earlier_answers")


class PromptLookupDrafter(CopyingDrafter):
    name = "pld"
    summary = "Prompt lookup: copies what followed the latest match of the longest n-gram"
    guesses_from = "the text so far"
    tree_shape = "chain"
    Options = PromptLookupOptions
    _index: ContextMatch | CompiledContextMatch

    def new_index(self) -> ContextMatch | CompiledContextMatch:
        return new_context(range(self.options.min_ngram, self.options.max_ngram + 1))

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self.learns_in_batch = isinstance(self._index, CompiledContextMatch)

    def propose(self, budget: int) -> DraftTree:
        root = self._index.last
        match = self._index.match(min(self.options.max_draft, budget - 1)) if budget > 1 else None
        if match is None:
            return DraftTree.root_only(root)
        return DraftTree.chain([root, *match.tokens], "context", [1.0, *match.trust()])

    @classmethod
    def observe_batch(cls, drafters: Sequence["PromptLookupDrafter"], verified: VerifiedBatch) -> None:
        contexts = [each.index for drafter in drafters if isinstance(each := drafter._index, CompiledContextMatch)]
        extend_contexts(contexts, verified.outcomes)
