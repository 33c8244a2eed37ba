"""The head or small model of a blend: reads the text as other drafters with one do, and expands nodes of the blended
tree."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from draftwood.drafters.base import DraftRequest, PromptRows, VerifiedTree
from draftwood.drafters.heads import HeadDrafter
from draftwood.drafters.neural import NeuralDrafter, SharedDraftModel
from draftwood.drafters.neural_options import MAX_NODES
from draftwood.drafters.sps import SmallModelDrafter
from draftwood.growth import (
    MOST_LEVELS,
    Blend,
    BlendedTree,
    BlendLimits,
    CycleShape,
    DraftRecords,
    ExpandingBlend,
    OwnWorth,
    SearchedBlend,
    SearchedDraft,
    Trust,
    search_levels,
)
from draftwood.growth.neural import Search
from draftwood.heads import ShippedHead, any_head_fits, find_shipped_head, fingerprint, list_shipped_heads
from draftwood.sources import DraftedHints
from draftwood.targets import DeviceAnswer, Target, TargetInfo, TargetParts
from draftwood.tree import DraftTree

MAX_UNREAD = 64  # tokens that a head that does not pay keeps for the time when it does
MAX_PROMPT = 256  # last tokens of a prompt that a head reads: the others take longer than they gain


class Verified(NamedTuple):
    """A tree from a search that was cut and verified."""

    grown: SearchedBlend
    num_kept: int  # nodes
    emitted: Sequence[int]


class Expander(NeuralDrafter):
    """Drafts for one request of ``blend``."""

    name = "blend"
    chooses_levels = False  # the blended tree decides

    def follow(self, blend: Blend, rows: DraftedHints, records: DraftRecords, *, is_timed: bool) -> None:
        """Once per request, before ``begin``."""
        self._blend, self._rows, self._records, self._is_timed = blend, rows, records, is_timed
        self._trust, self._worth = Trust(records.trust), OwnWorth(records.worth)
        self._search: SearchedDraft | None = None  # that the last tree is from
        self._next: SearchedDraft | None = None  # launched for the next one
        self._goes_ahead = False  # whether the next draft could be launched ahead
        self._has_read = False  # whether this draft read text in passes of its own, before the search
        self._noted = 0.0  # when the last cycle ended
        self._without: BlendedTree | None = None  # instead of it
        self._verified: Verified | None = None  # not noted yet

    def begin(self, request: DraftRequest) -> None:
        super().begin(request)
        self.num_text = len(request.prompt_ids)  # tokens that the target has
        self._records.passes.note_request()

    def aim(self, tail: Sequence[int], limits: BlendLimits, num_requests: int) -> None:
        """Before each proposal: the end of the text, the limits of the tree, and how many requests the batch has."""
        self._num_requests = num_requests
        self._tail, self._limits = tail, limits._replace(budget=min(limits.budget, MAX_NODES))

    @property
    def searches(self) -> bool:
        """Whether it runs whole searches by itself."""
        return self._model.searches

    @property
    def pays(self) -> bool:
        """Whether the request is quicker with such searches than without."""
        return self._worth.pays

    @classmethod
    def propose_batch(cls, drafters: Sequence[Expander], budgets: Sequence[int]) -> list[DraftTree]:  # type: ignore[override]
        first = drafters[0]
        if not first._model.searches:
            return super().propose_batch(drafters, budgets)
        is_timed = any(drafter._is_timed for drafter in drafters)
        goes_ahead = len(drafters) == 1 and first._goes_ahead
        if not goes_ahead:  # else it can wait until the target's next pass runs
            for drafter in drafters:
                drafter._note_verified()
        if first._next is not None and len(drafters) == 1:
            search = first._next
        else:
            search = SearchedDraft(first._records.searches, len(drafters), is_timed=is_timed, goes_ahead=goes_ahead)
        search.start(first._noted if goes_ahead else None)
        for drafter in drafters:
            drafter._search, drafter._next, drafter._goes_ahead, drafter._has_read = search, None, False, False
            drafter._rows.clear()
            drafter._without = drafter._blend_without() if search.looks else None
        known = [drafter._without.promise for drafter in drafters if drafter._without is not None]
        if known:
            search.look(known, [each._gains(promise) for each, promise in zip(drafters, known, strict=True)])
        trees = super().propose_batch(drafters, budgets)
        levels = max(drafter._growth.levels for drafter in drafters if isinstance(drafter._growth, SearchedBlend))
        # Drafts that read more text than others, such as a prompt, take longer.
        search.end(levels, counts=first.was_ready and not any(drafter._has_read for drafter in drafters))
        return trees

    def draft_ahead(self, answer: DeviceAnswer, budget: int) -> None:
        self._goes_ahead = True
        super().draft_ahead(answer, budget)
        self._note_verified()  # while the target's pass runs
        if self._ahead is None:
            self._next = None

    def _search_ahead(self, size: int) -> Search | None:
        search = SearchedDraft(self._records.searches, 1, is_timed=self._is_timed, is_ahead=True)
        levels = min(search.levels, self._model.max_depth or MOST_LEVELS, self._limits.max_depth)
        if not levels:
            return None
        self._next = search
        return search_levels(self._root, size, levels).search

    def _read_text(self, max_left: int) -> None:
        self._has_read = True
        super()._read_text(max_left)

    def _gains(self, promise: float) -> list[float]:
        """What levels of a search gain for this request, whose tree promises so much without them."""
        share = self._trust.share
        return [share * gain for gain in self._records.searches.gains(promise)]

    def _blend_without(self) -> BlendedTree:
        """What the other sources make."""
        tree = self._blend.tree(self._tail, self._limits)
        return BlendedTree(tree, self._limits.budget, self._records.searches.floor)

    def _new_growth(self, size: int) -> ExpandingBlend | SearchedBlend:
        can_draft = size > 1
        if self._search is not None:
            deepest = min(self._model.max_depth or MOST_LEVELS, self._limits.max_depth)
            levels = min(self._search.levels, deepest) if can_draft else 0
            return SearchedBlend(self._blend, self._tail, self._limits, self._rows, self._without, levels)
        self._rows.clear()
        return ExpandingBlend(
            self._blend,
            self._tail,
            self._limits,
            self._rows.add,
            self._records.passes if can_draft else None,
            max_depth=self._model.max_depth,
            is_timed=self._is_timed,
            trust=self._trust,
            num_requests=self._num_requests,
        )

    def note_cycle(self, seconds: float, num_kept: int, emitted: Sequence[int]) -> None:
        """The last tree was cut to ``num_kept`` nodes, and verified ``seconds`` after it was ready."""
        growth, context = self._growth, self.num_text
        self._noted = time.perf_counter()
        self.num_text += len(emitted)
        if self._search is not None and isinstance(growth, SearchedBlend):
            self._search.note_cycle()
            self._note_verified()
            self._verified = Verified(growth, num_kept, emitted)
        elif isinstance(growth, ExpandingBlend):
            shape = CycleShape(num_kept, context, growth.has_passes)
            self._records.passes.note_cycle(seconds, self._num_requests, shape)
            growth.note(num_kept, emitted)
            if self._is_timed:
                self._records.passes.note_kept(growth.values, num_kept)

    def end(self) -> None:
        self._note_verified()
        super().end()

    def _note_verified(self) -> None:
        """What the last search gained."""
        verified, self._verified = self._verified, None
        if verified is None:
            return
        found = self._records.searches.note_tree(*verified, self._trust)
        if found is not None:
            self._worth.note_tokens(1 + found[0], 1 + found[1])


class BlendModel(Expander, SmallModelDrafter):
    """A small model reads what it missed by itself."""


class BlendHead(Expander, HeadDrafter):
    """It need not have read the whole text: other sources guess where it cannot, and it soon has enough context
    again."""

    kinds = ("eagle", "eagle3", "medusa", "hydra")
    allows_gaps = True

    def read_prompt(self, rows: PromptRows) -> None:
        num_left_out = len(self._prompt_ids) - MAX_PROMPT - rows.start
        if rows.taps is None or num_left_out <= 0:
            super().read_prompt(rows)
        elif num_left_out < len(rows.taps):
            super().read_prompt(rows._replace(start=rows.start + num_left_out, taps=rows.taps[num_left_out:]))

    def observe(self, verified: VerifiedTree) -> None:
        super().observe(verified)
        while (excess := len(self._unread) - MAX_UNREAD) > 0 and len(self._features) > 1:
            taps, rows = self._features.pop(0)
            rows = range(len(taps)) if rows is None else rows
            if len(rows) > excess:
                self._features.insert(0, (taps, rows[excess:]))
            del self._unread[: min(len(rows), excess)]

    def skip(self, token_ids: Sequence[int]) -> None:
        """Without the hidden states of these tokens, it goes on after the next tree."""
        if self._is_borrowing:  # the target's memory has other states now
            taps, rows = self._features.pop()
            del self._unread[-(len(taps) if rows is None else len(rows)) :]
            self._is_borrowing = False
        if self._length == 0 and self._sequence is not None:
            self._read_text(0)  # the prompt
        self._root = token_ids[-1]
        self._unread, self._features, self._ahead, self._next = [], [], None, None
        self._goes_ahead, self._noted = False, 0.0

    @classmethod
    def attach_shipped(cls, target: Target) -> SharedDraftModel | None:
        """The EAGLE-3 head that ships for this target; None if there is none."""
        info = target.info
        if not info.can_tap or not any_head_fits("eagle3", info):  # looks at sizes, not at the target's weights
            return None
        parts = target.parts()
        head = find_shipped_head("eagle3", info, fingerprint(parts.norm))
        return None if head is None else cls.load(head.folder, cls.Options(), target, parts)

    @classmethod
    def _shipped(cls) -> list[ShippedHead]:
        return list_shipped_heads()

    @classmethod
    def _find_shipped(cls, info: TargetInfo, parts: TargetParts) -> Path:
        head = find_shipped_head(None, info, fingerprint(parts.norm))
        if head is None:
            raise cls._missing_head(info.name)
        return head.folder
