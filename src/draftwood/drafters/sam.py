"""Suffix automaton decoding: copy what followed the longest suffix of the text that occurred before."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from draftwood.drafters.checks import check_flag, check_int
from draftwood.drafters.copying import CopyingDrafter
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
    earlier_answers: bool = False  # also draft from finished answers to the same prompt; see `memory`

    def __post_init__(self) -> None:
        check_int(self, 1, "max_draft", "min_match")
        check_int(self, 0, "static_bias")
        check_flag(self, "earlier_answers")
        if not isinstance(self.corpus, str | Path | None):
            raise OptionError("sam needs the path of a file for corpus", got=self.corpus)


class SuffixDrafter(CopyingDrafter):
    name = "sam"
    summary = "Suffix automaton: copies what followed the longest match in the text or in a corpus"
    guesses_from = "the text so far, and a corpus if given"
    tree_shape = "chain"
    Options: ClassVar[type[SuffixOptions]] = SuffixOptions
    _index: SuffixSource

    @classmethod
    def share(cls, options: SuffixOptions, target: TargetInfo) -> CorpusAutomaton | None:
        if options.corpus is None:
            return None
        return CorpusAutomaton(load_corpus(options.corpus, target.vocab_size).data)

    def new_index(self) -> SuffixSource:
        return SuffixSource(self.shared, min_match=self.options.min_match, static_bias=self.options.static_bias)

    def propose(self, budget: int) -> DraftTree:
        root = self._index.tokens[-1]
        match = self._index.match(min(self.options.max_draft, budget - 1))
        if match is None:
            return DraftTree.root_only(root)
        return DraftTree.chain([root, *match.tokens], self._index.source, [1.0, *match.trust()])
