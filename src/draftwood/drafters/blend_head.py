"""The head of a blend: reads the text as any drafter with a head does, and expands nodes of the blended tree."""

from collections.abc import Sequence
from pathlib import Path

from draftwood.drafters.heads import HeadDrafter
from draftwood.drafters.neural import MAX_NODES
from draftwood.growth import Blend, BlendLimits, ExpandingBlend, PassRecord
from draftwood.heads import ShippedHead, find_shipped_head, fingerprint, list_shipped_heads
from draftwood.sources import DraftedHints
from draftwood.targets import TargetInfo, TargetParts


class BlendHead(HeadDrafter):
    """Drafts for one request of ``blend``."""

    name = "blend"
    kinds = ("eagle", "eagle3", "medusa", "hydra")
    chooses_levels = False  # the blended tree decides after each pass

    def follow(self, blend: Blend, rows: DraftedHints, passes: PassRecord, *, is_timed: bool) -> None:
        """Once per request, before ``begin``."""
        self._blend, self._rows, self._passes, self._is_timed = blend, rows, passes, is_timed

    def aim(self, tail: Sequence[int], limits: BlendLimits) -> None:
        """Before each proposal: the end of the text, and the limits of the tree."""
        self._tail, self._limits = tail, limits._replace(budget=min(limits.budget, MAX_NODES))

    def _new_growth(self, size: int) -> ExpandingBlend:
        self._rows.clear()
        can_draft = size > 1
        return ExpandingBlend(
            self._blend,
            self._tail,
            self._limits,
            self._rows.add,
            self._passes if can_draft else None,
            max_depth=self._model.max_depth,
            is_timed=self._is_timed,
        )

    @classmethod
    def _shipped(cls) -> list[ShippedHead]:
        return list_shipped_heads()

    @classmethod
    def _find_shipped(cls, info: TargetInfo, parts: TargetParts) -> Path:
        head = find_shipped_head(None, info, fingerprint(parts.norm))
        if head is None:
            raise cls._missing_head(info.name)
        return head.folder
