"""Adaptive n-gram parallel decoding (ANPD): guess from n-gram counts of the prompt and the output so far."""

from dataclasses import dataclass
from typing import ClassVar

from draftwood.drafters.base import Drafter, DraftRequest, VerifiedTree
from draftwood.drafters.checks import check_int
from draftwood.sources import AdaptiveNgrams
from draftwood.tree import DraftTree


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveNgramOptions:
    max_order: int = 5  # largest n: the next token is guessed from up to n-1 tokens
    max_draft: int = 8  # maximum length of the draft

    def __post_init__(self) -> None:
        check_int(self, 2, "max_order")
        check_int(self, 1, "max_draft")


class AdaptiveNgramDrafter(Drafter):
    name = "anpd"
    summary = "Adaptive n-gram decoding: the most frequent next token after the longest known n-gram"
    guesses_from = "n-gram counts of the text so far"
    tree_shape = "chain"
    copies_text = True
    Options: ClassVar[type[AdaptiveNgramOptions]] = AdaptiveNgramOptions

    def begin(self, request: DraftRequest) -> None:
        self._ngrams = AdaptiveNgrams(self.options.max_order)
        self._ngrams.extend(request.known_text)

    def propose(self, budget: int) -> DraftTree:
        guess = self._ngrams.guess(min(self.options.max_draft, budget - 1))
        return DraftTree.chain([self._ngrams.tokens[-1], *guess.tokens], "ngram", [1.0, *guess.probs])

    def observe(self, verified: VerifiedTree) -> None:
        self._ngrams.extend(verified.emitted)
