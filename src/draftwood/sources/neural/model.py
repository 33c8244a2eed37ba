"""A small model as a draft model: any target that can run trees drafts for one with the same vocabulary."""

from collections.abc import Sequence

import numpy as np

from draftwood.errors import CapabilityError
from draftwood.sources.neural.base import DraftModel, DraftSegment
from draftwood.targets import DEFAULT_TOP_K, Found, SearchPlan, Segment, Target, TopRows, top_rows


class SmallModel(DraftModel):
    """``num_tokens`` is the vocabulary size of the target; higher ids are never suggested."""

    def __init__(self, target: Target, num_tokens: int) -> None:
        if not target.info.can_tree:
            raise CapabilityError(
                "The draft model cannot run trees",
                got=f"{target.info.name} ({target.info.backend})",
                next_step="Name another draft model.",
            )
        self.target = target
        self._num_tokens = num_tokens
        self.max_positions = min(target.info.context_length, target.num_slots)
        if target.info.pass_sizes:
            self.root_chunk = 16
            self.searches = target.info.vocab_size <= num_tokens  # it would run guesses that the target does not have

    @property
    def num_prepared(self) -> int:
        return self.target.num_prepared

    def open(self, capacity: int) -> int | None:
        return self.target.open(capacity) if self.target.can_open(capacity) else None

    def close(self, sequence: int) -> None:
        self.target.close(sequence)

    def forward(self, segments: Sequence[DraftSegment], k: int) -> TopRows:
        self.target.set_taps(())
        self.target.set_top(max(k, DEFAULT_TOP_K))  # avoids changing the size of the output for small k
        output = self.target.forward([self._clip_ids(each.segment) for each in segments])
        k = min(k, output.logits.shape[1])
        top = output.top
        if top is None or top.ids.shape[1] < k:
            top = top_rows(output.logits, k)
        top = top.first(k)
        if int(top.ids.max(initial=-1)) < self._num_tokens:
            return top
        known = top.ids < self._num_tokens  # models of one family pad their vocabularies differently
        return TopRows(np.where(known, top.ids, -1), np.where(known, top.logits, -np.inf), top.log_total)

    def grow(self, segments: Sequence[DraftSegment], plan: SearchPlan) -> list[Found] | None:
        if not self.searches:
            return None
        self.target.set_taps(())
        return self.target.grow([self._clip_ids(each.segment) for each in segments], plan)

    def _clip_ids(self, segment: Segment) -> Segment:
        """Replace tokens that the model does not have by token 0; this only affects the quality of guesses."""
        size = self.target.info.vocab_size
        if max(segment.token_ids) < size:
            return segment
        return segment._replace(token_ids=[token if token < size else 0 for token in segment.token_ids])

    def keep(self, sequence: int, nodes: Sequence[int]) -> None:
        self.target.keep(sequence, nodes)
