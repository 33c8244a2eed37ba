"""Plain decoding: the same cycle with a tree that has only its root."""

from collections.abc import Sequence

from draftwood.drafters.base import Drafter, DraftRequest, VerifiedBatch, VerifiedTree
from draftwood.tree import DraftTree


class PlainDrafter(Drafter):
    name = "plain"
    summary = "Plain decoding without guesses"
    guesses_from = "none"
    tree_shape = "root only"
    wants_logits = False
    learns_in_batch = True
    can_rest = True  # and does, always
    _last: int

    def begin(self, request: DraftRequest) -> None:
        self._last = request.prompt_ids[-1]

    def propose(self, budget: int) -> DraftTree:
        return DraftTree.root_only(self._last)

    @classmethod
    def observe_batch(cls, drafters: Sequence["PlainDrafter"], verified: VerifiedBatch) -> None:
        for drafter, emitted in zip(drafters, verified.outcomes.emitted, strict=True):
            drafter._last = emitted[-1]

    def observe(self, verified: VerifiedTree) -> None:
        self._last = verified.emitted[-1]

    def skip(self, token_ids: Sequence[int]) -> None:
        self._last = token_ids[-1]
