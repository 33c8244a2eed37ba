"""Suffix automaton decoding with a fallback: token recycling if the match is short."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

from draftwood.drafters.base import DraftRequest, VerifiedTree
from draftwood.drafters.checks import check_int
from draftwood.drafters.recycling import RecyclingDrafter, RecyclingOptions
from draftwood.drafters.sam import SuffixDrafter, SuffixOptions
from draftwood.drafters.transition import TransitionDrafter
from draftwood.sources import CorpusAutomaton, SuccessorArrays, SuffixSource, TransitionTable
from draftwood.targets import TargetInfo
from draftwood.tree import BYPASS, DraftTree


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixRecyclingOptions(RecyclingOptions):
    threshold: int = 5  # shorter matches fall back to token recycling
    max_draft: int = 40  # maximum number of copied tokens
    min_match: int = 1  # shorter matches draft nothing
    corpus: str | Path | None = None  # also match in a datastore, or in token ids in .npy, -1 between documents
    static_bias: int = 5  # use the corpus if its match is longer than that in the text by more than this

    def __post_init__(self) -> None:
        RecyclingOptions.__post_init__(self)
        check_int(self, 1, "threshold")
        self.suffix_options()

    def suffix_options(self) -> SuffixOptions:
        """The options of `sam`, checked by it."""
        own = [field.name for field in fields(SuffixOptions) if hasattr(self, field.name)]
        return SuffixOptions(**{name: getattr(self, name) for name in own})


class _SharedTables(NamedTuple):
    successors: SuccessorArrays | None
    corpus: CorpusAutomaton | None


class SuffixRecyclingDrafter(RecyclingDrafter):
    name = "sam+recycling"
    summary = "Suffix automaton where the match is long, token recycling where it is short"
    guesses_from = "the text so far, or logits of earlier passes where the match is short"
    tree_shape = "chain or static"
    copies_text = True
    Options = SuffixRecyclingOptions

    @classmethod
    def share(cls, options: SuffixRecyclingOptions, target: TargetInfo) -> _SharedTables:  # type: ignore[override]
        return _SharedTables(
            TransitionDrafter.share(options, target), SuffixDrafter.share(options.suffix_options(), target)
        )

    @classmethod
    def new_memory(cls, options: SuffixRecyclingOptions, target: TargetInfo, shared: _SharedTables) -> TransitionTable:
        return super().new_memory(options, target, shared.successors)

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        options: SuffixRecyclingOptions = self.options
        self._suffix = SuffixSource(self.shared.corpus, min_match=options.min_match, static_bias=options.static_bias)
        self._suffix.extend(request.known_text)

    def propose(self, budget: int) -> DraftTree:
        source = self._suffix
        match = source.match(min(self.options.max_draft, budget - 1)) if budget > 1 else None
        if match is None or source.matched < self.options.threshold:
            return super().propose(budget)
        return DraftTree.chain([self.anchor.root, *match.tokens], source.source, [1.0, *match.trust()], BYPASS)

    def observe(self, verified: VerifiedTree) -> None:
        self._suffix.extend(verified.emitted)
        super().observe(verified)
