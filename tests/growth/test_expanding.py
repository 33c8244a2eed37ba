"""A blend that a draft model takes part in: what a pass gained."""

import numpy as np
import pytest

from draftwood.compiled import Hints
from draftwood.growth import Blend, BlendLimits, ExpandingBlend, PassRecord, new_learned
from draftwood.growth.priors import NO_PRIORS
from draftwood.sources import DraftedHints
from tests.growth.test_blend import FixedHints


class AfterRoot(FixedHints):
    """It knows what follows the text, and nothing about what follows that."""

    def look(self, tail: list[int], depth: int) -> Hints | None:
        return super().look(tail, depth) if depth == 0 else None


def gained_by(predicted: list[int], probs: list[float], floor: float = 0.0) -> float:
    """What a head gained that was run over the root, where a table guesses 5 with a chance of 0.6."""
    head = DraftedHints("head")
    sources = [AfterRoot("table", [5], [1], [0.02, 0.6]), head]
    record = PassRecord()
    record.floor = floor
    blend = Blend(sources, new_learned(sources, NO_PRIORS))
    noted: list[float] = []
    record.note_pass = lambda _number, _chances, gained, _seconds: noted.append(gained)  # type: ignore[method-assign]
    growth = ExpandingBlend(blend, [1], BlendLimits(8, 4, 1e-4), head.add, record, max_depth=None, is_timed=False)
    assert growth.tree().tokens == (1, 5)
    frontier = growth.frontier()
    assert frontier is not None
    assert frontier.tokens == [1]
    growth.grow(np.array([predicted], np.int32), np.array([probs], np.float32))
    return noted[0]


def test_likelier_or_less_likely_is_no_gain() -> None:
    """The tree has the same node as before, whether the head agrees or has another opinion about it."""
    assert gained_by([5], [0.9]) == 0.0
    assert gained_by([5], [0.01]) == 0.0


def test_new_nodes_are_gained() -> None:
    unlikely, likely = (gained_by([5, 7], [0.05, prob]) for prob in (0.1, 0.9))
    assert 0.0 < unlikely < likely <= 1.0


def test_nodes_that_are_cut_off_anyway_do_not_count() -> None:
    assert gained_by([5, 7], [0.05, 0.1], floor=0.5) == 0.0
    below, above = (gained_by([5, 7], [0.05, 0.9], floor=floor) for floor in (0.0, 0.1))
    assert above == pytest.approx(below - 0.1)
