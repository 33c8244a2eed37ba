"""Drafters whose estimates are learned rates need not grow what would be cut off."""

from __future__ import annotations

import pytest

from draftwood import LLM, SamplingParams
from draftwood.drafters.blend import MIN_VALUE, BlendDrafter
from draftwood.sizing.costs import CostProfile
from draftwood.sizing.live import LiveCosts
from draftwood.sizing.sizer import EDGE_FALL, EDGE_RISE, MARGIN, MIN_EDGE, Experience, Sizer, note_silence
from draftwood.targets.tiny import tiny_target
from draftwood.text.bytes import ByteTokenizer
from draftwood.tree import DraftTree, TreeBuilder
from tests.tools.sizing import HOPELESS, KNEE, cut, cut_all, drafts_of, sizer

SLOPE = CostProfile((1, 2, 64), (16,), ((1.0, 1.1, 7.3),))  # a position costs a tenth of a pass


def branches(*chances: float) -> DraftTree:
    builder = TreeBuilder(0)
    for token, chance in enumerate(chances, start=1):
        builder.add(0, token, "a", chance)
    return builder.build()


def calibrated() -> tuple[Sizer, Experience]:
    drafter = Experience(is_calibrated=True)
    return Sizer(LiveCosts(SLOPE), drafter), drafter


def test_the_edge_rises_slowly_to_what_is_cut_off_and_falls_at_once() -> None:
    by, drafter = calibrated()
    assert drafter.edge == MIN_EDGE
    tree = branches(0.5, 0.2, 0.11, 0.04, 0.01)
    for cycle in range(1, 40):
        kept = cut(by, tree)
        assert 1 < len(kept) < len(tree)
        assert drafter.edge == pytest.approx(min(MIN_EDGE * EDGE_RISE**cycle, tree.probs[len(kept)]))
    assert by.min_chance == MARGIN * tree.probs[len(kept)]
    drafter.note_edge(0.02, 0.3)  # a guess of another kind paid although it seemed unlikely
    assert drafter.edge == 0.02


def test_it_falls_where_nothing_is_cut_off() -> None:
    """Copies say nothing about what else would pay."""
    by, drafter = calibrated()
    drafter.edge = 0.4
    cut(by, branches(0.9))
    assert drafter.edge == EDGE_FALL * 0.4
    for _ in range(20):
        cut(by, branches(0.9))
    assert drafter.edge == MIN_EDGE


def test_requests_of_a_drafter_share_it() -> None:
    drafter = Experience()
    drafter.edge = 0.5
    assert cut(sizer(HOPELESS, drafter), branches(0.4)).size == 1
    assert sizer(KNEE, drafter).min_chance == MARGIN * 0.4


def test_drafters_of_a_batch_have_edges_of_their_own() -> None:
    """Their estimates may differ in what they mean."""
    costs, drafters = LiveCosts(SLOPE), [Experience(is_calibrated=True) for _ in range(2)]
    trees = [branches(0.5, 0.04), branches(0.5, 0.01)]
    for _ in range(40):
        cut_all(drafts_of([Sizer(costs, drafter) for drafter in drafters], trees))
    assert [drafter.edge for drafter in drafters] == [0.04, 0.01]


def test_silence_counts_for_drafters_that_have_nothing_to_offer() -> None:
    silent, busy = (Experience() for _ in range(2))
    silent.edge = busy.edge = 0.5
    note_silence([sizer(drafter=silent), sizer(drafter=busy)], [sizer(drafter=busy)])
    assert (silent.edge, busy.edge) == (EDGE_FALL * 0.5, 0.5)


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
        drafter.edge = 0.9
        drafter.watch.pause_left = 0
        monkeypatch.setattr(BlendDrafter, "propose_batch", classmethod(offer_nothing))
        llm.generate(["abc abc abc"], SamplingParams(max_tokens=5, ignore_eos=True))
    assert drafter.edge == 0.9 * EDGE_FALL**4  # the last token needs no guesses
