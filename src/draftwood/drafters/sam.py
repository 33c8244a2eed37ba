"""Suffix automaton decoding: copy what followed the longest suffix of the text that occurred before."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from draftwood.drafters.base import Drafter, DraftRequest, VerifiedTree
from draftwood.drafters.checks import check_int
from draftwood.errors import OptionError
from draftwood.sources import CorpusAutomaton, SuffixSource, load_corpus
from draftwood.targets import TargetInfo
from draftwood.tree import DraftTree


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixOptions:
    max_draft: int = 40  # maximum number of copied tokens
    min_match: int = 1  # shorter matches draft nothing
    corpus: str | Path | None = None  # also match in a datastore, or in token ids in .npy, -1 between documents
    static_bias: int = 5  # use the corpus if its match is longer than that in the text by more than this

    def __post_init__(self) -> None:
        check_int(self, 1, "max_draft", "min_match")
        check_int(self, 0, "static_bias")
        if not isinstance(self.corpus, str | Path | None):
            raise OptionError("sam needs the path of a file for corpus", got=self.corpus)


class SuffixDrafter(Drafter):
    name = "sam"
    summary = "Suffix automaton: copies what followed the longest match in the text or in a corpus"
    guesses_from = "the text so far, and a corpus if given"
    tree_shape = "chain"
    copies_text = True
    Options: ClassVar[type[SuffixOptions]] = SuffixOptions
    wants_logits = False
    can_rest = True

    @classmethod
    def share(cls, options: SuffixOptions, target: TargetInfo) -> CorpusAutomaton | None:
        if options.corpus is None:
            return None
        return CorpusAutomaton(load_corpus(options.corpus, target.vocab_size).data)

    def begin(self, request: DraftRequest) -> None:
        options: SuffixOptions = self.options
        self._source = SuffixSource(self.shared, min_match=options.min_match, static_bias=options.static_bias)
        self._source.extend(request.known_text)

    def propose(self, budget: int) -> DraftTree:
        root = self._source.tokens[-1]
        match = self._source.match(min(self.options.max_draft, budget - 1))
        if match is None:
            return DraftTree.root_only(root)
        return DraftTree.chain([root, *match.tokens], self._source.source, [1.0, *match.trust()])

    def observe(self, verified: VerifiedTree) -> None:
        self._source.extend(verified.emitted)

    def skip(self, token_ids: Sequence[int]) -> None:
        self._source.extend(token_ids)
