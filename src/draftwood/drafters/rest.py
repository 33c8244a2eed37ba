"""REST: retrieve what followed the last tokens in a corpus and merge it into one tree."""

import os
from dataclasses import dataclass

from draftwood.drafters.base import Drafter, DraftRequest, VerifiedTree
from draftwood.drafters.checks import check_int, check_order
from draftwood.errors import OptionError
from draftwood.growth import grow_frequency_tree
from draftwood.sources import Datastore
from draftwood.targets import TargetInfo
from draftwood.tree import DraftTree


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrievalOptions:
    datastore: str | None = None  # required: the file
    max_match: int = 16  # longest suffix to look up
    min_match: int = 1  # shortest suffix to look up
    max_draft: int = 10  # tokens per match
    max_matches: int = 256  # maximum number of merged matches, spread evenly over all

    def __post_init__(self) -> None:
        if not isinstance(self.datastore, (str, os.PathLike)) or not os.fspath(self.datastore):
            raise OptionError(
                "The drafter 'rest' needs a datastore",
                got=None if self.datastore is None else repr(self.datastore),
                allowed="datastore=FILE",
                next_step="Build one: draftwood datastore build FILES... --out FILE",
            )
        check_int(self, 1, "max_match", "min_match", "max_draft", "max_matches")
        check_order(self, "min_match", "max_match")


class RetrievalDrafter(Drafter):
    name = "rest"
    summary = "Retrieval: the most frequent continuations of the longest match in a datastore"
    guesses_from = "a datastore built from your texts (`datastore=FILE`)"
    tree_shape = "prefix tree by frequency"
    Options = RetrievalOptions
    shared: Datastore

    @classmethod
    def share(cls, options: RetrievalOptions, target: TargetInfo) -> Datastore:
        return Datastore.open(str(options.datastore), vocab_size=target.vocab_size)

    def begin(self, request: DraftRequest) -> None:
        self._tail = list(request.prompt_ids[-self.options.max_match :])

    def propose(self, budget: int) -> DraftTree:
        options = self.options
        found = self.shared.matches(self._tail, options.max_match, options.min_match)
        if found is None or budget < 2:
            return DraftTree.root_only(self._tail[-1])
        rows = self.shared.continuations(found, options.max_draft, options.max_matches)
        return grow_frequency_tree(self._tail[-1], rows, "datastore", budget)

    def observe(self, verified: VerifiedTree) -> None:
        self._tail = [*self._tail, *verified.emitted][-self.options.max_match :]
