"""A blend with what a draft model finds by itself: the same tree as pass by pass, and how many levels it runs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.compiled import Hints, load_core
from draftwood.growth import (
    Blend,
    BlendedTree,
    BlendLimits,
    SearchedBlend,
    SearchedDraft,
    SearchRecord,
    Trust,
    new_learned,
    searched,
)
from draftwood.growth.priors import NO_PRIORS
from draftwood.growth.searched import MOST_LEVELS, TRY_EVERY
from draftwood.sources import DraftedHints
from draftwood.sources.hints import drafted
from draftwood.tree import DraftTree
from tests.growth.test_blend import FixedHints
from tests.growth.test_search import ROOT, Table, record, run_search

LIMITS = BlendLimits(24, 8, 1e-4)


class AfterText(FixedHints):
    """It knows what follows the text, and nothing about what follows that."""

    def look(self, tail: list[int], depth: int) -> Hints | None:
        return super().look(tail, depth) if depth == 0 else None


def new_growth(levels: int, without: BlendedTree | None = None) -> SearchedBlend:
    head = DraftedHints("head")
    sources = [AfterText("table", [5], [1], [0.02, 0.6]), head]
    blend = Blend(sources, new_learned(sources, NO_PRIORS))
    return SearchedBlend(blend, [1, 2, ROOT], LIMITS, head, without, levels)


def grow_by_passes(table: Table, growth: SearchedBlend) -> DraftTree:
    depths = list[int]()
    while (frontier := growth.frontier()) is not None:
        new = [0 if parent < 0 else depths[parent] + 1 for parent in frontier.parents]
        depths += new
        rows = [table.row(token, depth) for token, depth in zip(frontier.tokens, new, strict=True)]
        growth.grow(*(np.stack(parts)[:, : growth.width] for parts in zip(*rows, strict=True)))
    return growth.tree()


@pytest.mark.parametrize("has_core", [True, False])
@given(seed=st.integers(0, 300), levels=st.integers(1, 4), tree=st.integers(0, 2))
def test_a_search_predicts_what_its_passes_would(has_core: bool, seed: int, levels: int, tree: int) -> None:
    if has_core and load_core() is None:
        pytest.skip("no compiler")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searched, "WIDTH", 4)
        patch.setattr(SearchedBlend, "width", 4)
        if not has_core:
            patch.setattr(drafted, "load_core", lambda: None)
        table = Table(seed, 4)
        by_passes, by_search = new_growth(levels), new_growth(levels)
        grown = grow_by_passes(table, by_passes)
        assert by_search.search is not None
        found = record(by_search.search, run_search(table, by_search.search), tree, num_trees=3)
        by_search.take(found)
        # A pass by pass search leaves out nodes that cannot have a child in its own tree, the other one does not.
        blended = by_search.tree()
    common = set(grown.paths()) & set(blended.paths())
    assert len(common) >= 0.8 * len(grown)
    run = [number for number in by_search.expansion_of if number >= 0]
    assert by_search.expansion_of[0] == 0
    assert len(set(run)) == len(run)
    paths = blended.paths()
    for path, number in zip(paths, by_search.expansion_of, strict=True):
        if number > 0:  # it was run, so it is a token that was found after its parent
            node = number - 1 + found.width
            assert found.tokens[found.picks[node]] == path[-1]


@pytest.mark.skipif(load_core() is None, reason="no compiler")
@given(seed=st.integers(0, 300), has_names=st.booleans(), length=st.integers(1, 40))
def test_c_keeps_the_same_predictions(seed: int, has_names: bool, length: int) -> None:
    growth = new_growth(3)
    assert growth.search is not None
    search = growth.search._replace(width=5, top_k=5)
    found = record(search, run_search(Table(seed, 5), search), 1, num_trees=2)
    if has_names:
        found = found._replace(names=np.random.default_rng(seed).permutation(50).astype(np.int32))
    tail = list(range(length))
    in_python = drafted.PythonDrafted()
    in_python.add_found(tail, found)
    in_c = DraftedHints("head")
    in_c.add_found(tail, found)
    learned = new_learned([in_c], NO_PRIORS)
    for text, (ids, _) in in_python._rows.items():
        guesses = Blend([in_c], learned)._own.guesses(text, len(text) - 1)
        assert [token for token, _, _ in guesses] == list(dict.fromkeys(ids))
    assert len(in_python._rows) > 1


def test_a_draft_without_levels_is_the_tree_of_the_others() -> None:
    growth = new_growth(0)
    assert growth.frontier() is None
    assert growth.tree().tokens == (ROOT, 5)
    known = BlendedTree(growth.tree(), LIMITS.budget, 0.0)
    assert known.promise == pytest.approx(1.0 + growth.tree().probs[1])
    assert new_growth(0, known).tree() is known.tree


def test_a_level_gains_what_the_tree_would_not_have() -> None:
    without = BlendedTree(new_growth(0).tree(), LIMITS.budget, 0.0)
    growth = new_growth(2, without)
    ids = np.array([[5, 7]], np.int32)
    growth.grow(ids, np.array([[0.7, 0.2]], np.float32))
    growth.grow(np.array([[8], [9]], np.int32), np.array([[0.9], [0.9]], np.float32))
    paths = dict(zip(growth.tree().paths(), growth.tree().values(), strict=True))
    assert set(paths) == {(), (5,), (7,), (5, 8), (7, 9)}
    first, second = growth.gains(without, growth.tree().values())
    assert first == pytest.approx(paths[7,])  # 5 was there before
    assert second == pytest.approx(paths[5, 8] + paths[7, 9])
    assert [len(without.tree.follow(path)) for path in ([5, 8], [7, 9], [])] == [1, 0, 0]
    assert [len(growth.tree().follow(path)) for path in ([5, 8], [7, 9, 1], [])] == [2, 2, 0]


class Clock:
    now = 0.0


def run_drafts(
    record: SearchRecord, count: int, *, level_seconds: float, gained: int, trust: Trust, is_ahead: bool = False
) -> list[int]:
    """Drafts with the head, where a cycle takes 1 second and the others make a tree of two tokens. Each level promises
    0.3 tokens; ``gained``: tokens that really come of the levels. ``is_ahead``: searches are launched before their text
    is known."""
    levels, upcoming = list[int](), None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searched.time, "perf_counter", lambda: Clock.now)
        for _ in range(count):
            draft = upcoming or SearchedDraft(record, 1, is_timed=True, goes_ahead=is_ahead)
            draft.start(Clock.now if is_ahead else None)
            without = BlendedTree(new_growth(0).tree(), LIMITS.budget, 0.0)
            if draft.looks:
                own = [trust.share * gain for gain in record.gains(without.promise)]
                draft.look([without.promise], [own])
            growth = new_growth(draft.levels, without if draft.looks else None)
            patch.setattr(growth, "gains", lambda *_, levels=draft.levels: [0.3] * levels)
            text = [99] * (1 + gained if draft.levels else 1)
            tree = DraftTree.chain([ROOT, *text[:-1]], "head") if draft.levels else without.tree
            patch.setattr(growth, "tree", lambda tree=tree: tree)
            Clock.now += 0.1 + level_seconds * draft.levels
            draft.end(draft.levels)
            Clock.now += 1.0
            draft.note_cycle()
            record.note_tree(growth, 1, text, trust)
            levels.append(draft.levels)
            upcoming = SearchedDraft(record, 1, is_timed=True, is_ahead=True) if is_ahead else None
            upcoming = upcoming if upcoming is not None and upcoming.levels else None
    return levels


def test_levels_are_run_while_they_pay() -> None:
    free = run_drafts(SearchRecord(), 120, level_seconds=0.001, gained=3, trust=Trust())
    assert free[0] == MOST_LEVELS
    assert free[-20:] == [MOST_LEVELS] * 20
    dear = run_drafts(SearchRecord(), 600, level_seconds=0.6, gained=3, trust=Trust())
    assert dear.count(0) > 0.9 * len(dear)
    tried = [number for number, levels in enumerate(dear) if levels][-4:]
    assert all(later - earlier > 4 * TRY_EVERY for earlier, later in pairwise(tried))


def test_levels_of_searches_that_are_launched_ahead() -> None:
    """They are those of the last look, and all of them now and then: that is how they come back when they pay again."""
    record, trust = SearchRecord(), Trust()
    pays = {"level_seconds": 0.001, "gained": 3, "trust": trust, "is_ahead": True}
    assert run_drafts(record, 120, **pays)[-40:] == [MOST_LEVELS] * 40
    dear = run_drafts(record, 800, **(pays | {"gained": 0, "level_seconds": 0.08}))
    assert dear.count(0) > 0.6 * len(dear)
    assert MOST_LEVELS in dear[-400:]
    back = run_drafts(record, 1500, **pays)
    assert back[-40:].count(MOST_LEVELS) > 30


@pytest.mark.parametrize("is_ahead", [False, True])
def test_what_no_level_takes_is_tried_too(is_ahead: bool) -> None:
    """Otherwise a first draft that was slow would make no levels seem to be as slow as some, for ever."""
    record, trust = SearchRecord(), Trust()
    run_drafts(record, 20, level_seconds=0.09, gained=3, trust=trust, is_ahead=is_ahead)
    times = record.times_of(1, goes_ahead=is_ahead)
    times._drafts[0] = 3.0
    found = run_drafts(record, 400, level_seconds=0.09, gained=0, trust=trust, is_ahead=is_ahead)
    assert times.draft(0) == pytest.approx(0.1)
    assert found[200:].count(0) > 120


def test_promises_that_are_not_kept_are_not_trusted() -> None:
    shared = Trust()
    record = SearchRecord()
    kept = run_drafts(record, 400, level_seconds=0.08, gained=3, trust=Trust(shared))
    assert kept[200:].count(0) < 5  # trials
    own = Trust(shared)
    broken = run_drafts(record, 800, level_seconds=0.08, gained=0, trust=own)
    assert own.share < 0.5
    assert broken[400:].count(0) > 300
    assert shared.share > own.share  # the next request starts with more trust than this one ended with


def test_a_draft_that_could_not_run_says_nothing_about_levels() -> None:
    record = SearchRecord()
    run_drafts(record, 40, level_seconds=0.1, gained=3, trust=Trust())
    known = record.times_of(1).draft(MOST_LEVELS)
    draft = SearchedDraft(record, 1, is_timed=True)
    draft.start()
    draft.look([2.0], [[0.3] * MOST_LEVELS])
    assert draft.levels
    draft.end(0)
    assert record.times_of(1).draft(MOST_LEVELS) == known
