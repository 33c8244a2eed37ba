"""Drafters whose estimates are learned rates need not grow what would be cut off."""

from __future__ import annotations

import pytest

from draftwood import LLM, SamplingParams
from draftwood.drafters.blend import MIN_VALUE, BlendDrafter
from draftwood.sizing.costs import CostProfile
from draftwood.sizing.live import LiveCosts
from draftwood.sizing.sizer import LEAST_FALL, LEAST_RISE, MARGIN, Experience, Sizer
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import ByteTokenizer
from draftwood.tree import DraftTree, TreeBuilder
from tests.tools.sizing import CHAIN, HOPELESS, KNEE, cut, sizer

SLOPE = CostProfile((1, 2, 64), (16,), ((1.0, 1.1, 7.3),))  # a position costs a tenth of a pass


def test_nothing_is_known_before_the_first_cut() -> None:
    assert sizer().min_chance == 0.0


def test_least_chance_follows_the_guesses_that_paid() -> None:
    drafter = Experience(is_calibrated=True)
    by = Sizer(LiveCosts(SLOPE), drafter)
    builder = TreeBuilder(0)
    for token, chance in enumerate((0.5, 0.2, 0.11, 0.04, 0.01), start=1):
        builder.add(0, token, "a", chance)
    kept = cut(by, builder.build())
    assert 1 < len(kept) < 6
    least = kept.probs[-1]
    assert drafter.least == pytest.approx(least, rel=0.2)  # the rate of its kind, not the estimate itself
    assert by.min_chance == MARGIN * drafter.least
    before = drafter.least
    drafter.note_least(0.9)
    assert drafter.least == pytest.approx(LEAST_RISE * before)  # it rises slowly
    drafter.note_least(0.001)
    assert drafter.least == 0.001  # and falls at once


def test_it_falls_while_nothing_pays() -> None:
    drafter = Experience()
    by = Sizer(LiveCosts(HOPELESS), drafter)
    drafter.note_least(0.4)
    cut(by, CHAIN)
    assert drafter.least == LEAST_FALL * 0.4


def test_requests_of_a_drafter_share_it() -> None:
    drafter = Experience()
    cut(sizer(KNEE, drafter), CHAIN)
    assert sizer(KNEE, drafter).min_chance == MARGIN * drafter.least > 0.0


def test_blend_grows_no_path_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the engine: what blend proposes, and what it was told."""
    seen = list[tuple[float, float]]()
    propose = BlendDrafter.propose_batch.__func__  # type: ignore[attr-defined]

    def watch(cls: type[BlendDrafter], drafters: list[BlendDrafter], budgets: list[int]) -> object:
        trees = propose(cls, drafters, budgets)
        for drafter, tree in zip(drafters, trees, strict=True):
            values = [1.0]
            for parent, prob in zip(tree.parents[1:], tree.probs[1:], strict=True):
                values.append(values[parent] * prob)
            seen.append((drafter.min_chance, min(values)))
        return trees

    monkeypatch.setattr(BlendDrafter, "propose_batch", classmethod(watch))
    with LLM.from_target(tiny_target(), ByteTokenizer(), drafter="blend", budget="auto") as llm:
        llm.engine._costs = LiveCosts(SLOPE)
        llm.generate(["abc abc abc abd abc"] * 2, SamplingParams(max_tokens=60, ignore_eos=True))
    assert any(floor > MIN_VALUE for floor, _ in seen)
    assert all(least >= floor * (1 - 1e-9) for floor, least in seen)


def test_it_falls_while_nothing_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a request whose guesses are all less likely would never draft again."""

    def offer_nothing(_: type[BlendDrafter], drafters: list[BlendDrafter], __: list[int]) -> list[DraftTree]:
        return [DraftTree.root_only(drafter.anchor.root) for drafter in drafters]

    with LLM.from_target(tiny_target(), ByteTokenizer(), drafter="blend", budget="auto") as llm:
        llm.engine._costs = LiveCosts(SLOPE)
        llm.generate(["abc abc abc"], SamplingParams(max_tokens=4, ignore_eos=True))
        (drafter,) = llm.engine._experience.values()
        drafter.least = 0.9
        drafter.watch.pause_left = 0
        monkeypatch.setattr(BlendDrafter, "propose_batch", classmethod(offer_nothing))
        llm.generate(["abc abc abc"], SamplingParams(max_tokens=5, ignore_eos=True))
    assert drafter.least == 0.9 * LEAST_FALL**4  # the last token needs no guesses
