"""Adaptive n-gram parallel decoding (ANPD): guess from n-gram counts of the prompt and the output so far."""

from dataclasses import dataclass
from typing import ClassVar

from draftwood.drafters.checks import check_flag, check_int
from draftwood.drafters.copying import CopyingDrafter
from draftwood.sources import AdaptiveNgrams
from draftwood.tree import DraftTree


@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptiveNgramOptions:
    max_order: int = 5  # largest n: the next token is guessed from up to n-1 tokens
    max_draft: int = 8  # maximum length of the draft
    earlier_answers: bool = False  # also draft from finished answers to the same prompt; see `memory`

    def __post_init__(self) -> None:
        check_int(self, 2, "max_order")
        check_int(self, 1, "max_draft")
        check_flag(self, "earlier_answers")


class AdaptiveNgramDrafter(CopyingDrafter):
    name = "anpd"
    summary = "Adaptive n-gram decoding: the most frequent next token after the longest known n-gram"
    guesses_from = "n-gram counts of the text so far"
    tree_shape = "chain"
    Options: ClassVar[type[AdaptiveNgramOptions]] = AdaptiveNgramOptions
    _index: AdaptiveNgrams

    def new_index(self) -> AdaptiveNgrams:
        return AdaptiveNgrams(self.options.max_order)

    def propose(self, budget: int) -> DraftTree:
        guess = self._index.guess(min(self.options.max_draft, budget - 1))
        return DraftTree.chain([self._index.tokens[-1], *guess.tokens], "ngram", [1.0, *guess.probs])
