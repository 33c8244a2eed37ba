"""Requests whose drafts do not pay pause, and try again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from draftwood.sizing.costs import CostProfile
from draftwood.sizing.live import LiveCosts
from draftwood.sizing.sizer import MIN_DRAFT_COST, Experience, Load, Sizer, note_outcomes
from draftwood.sizing.watch import MAX_PAUSE, MAX_SCALE
from draftwood.tree import DraftTree
from tests.tools.sizing import CHAIN, FREE, HOPELESS, STEEP, cut, cut_all, drafts_of, play, sizer


def pauses(by: Sizer, tree: DraftTree, draft_seconds: float, num_cycles: int, emitted: Sequence[int]) -> list[bool]:
    """For every cycle, whether drafting was paused."""
    left_alone = []
    for _ in range(num_cycles):
        left_alone.append(by.wanted == 1)
        offered = DraftTree.root_only(tree.tokens[0]) if left_alone[-1] else tree
        part = cut(by, offered, draft_seconds=draft_seconds) if len(offered) > 1 else offered
        by.note(offered, part, emitted)
    return left_alone


def test_unprofitable_drafting_is_paused() -> None:
    wrong = [999]
    found = pauses(sizer(), CHAIN, 5.0, 20 * MAX_PAUSE, wrong)
    tries = [cycle for cycle, alone in enumerate(found) if not alone]
    gaps = [later - earlier - 1 for earlier, later in pairwise(tries) if later > earlier + 1]
    assert gaps[-2:] == [MAX_SCALE * MAX_PAUSE] * 2
    assert sorted(gaps) == gaps


@pytest.mark.parametrize("num_cycles", [4, 10, 40, 200])
def test_consecutive_requests_pause_like_one_long_request(num_cycles: int) -> None:
    expected = pauses(sizer(), CHAIN, 5.0, 400, [999])
    drafter, found = Experience(), list[bool]()
    while len(found) < len(expected):
        later = sizer(drafter=drafter)
        later.begin()
        found += pauses(later, CHAIN, 5.0, num_cycles, [999])
    # Its first draft may read the prompt, so a slow one does not count; a few more tries follow.
    assert found[-MAX_PAUSE:].count(False) <= 2
    assert abs(found.count(False) - expected.count(False)) <= 3


def test_request_that_may_not_pause_starts_drafting() -> None:
    drafter = Experience()
    pauses(sizer(drafter=drafter), CHAIN, 5.0, 220, [999])
    paused, other = sizer(drafter=drafter), sizer(drafter=drafter)
    paused.begin()
    other.begin(pausing=False)
    assert (paused.wanted, other.wanted > 1) == (1, True)


def test_short_requests_resume_profitable_drafting() -> None:
    drafter = Experience()
    pauses(sizer(drafter=drafter), CHAIN, 5.0, 20 * MAX_PAUSE, [999])
    assert drafter.watch.pause == MAX_PAUSE
    found: list[bool] = []
    for _ in range(40):
        short = sizer(FREE, drafter)
        short.begin()
        found += pauses(short, CHAIN, 0.0, MAX_PAUSE // 4, [*CHAIN.tokens[1:], 9])
    assert drafter.watch.pause == 1
    assert not any(found[-MAX_PAUSE:])


def side_by_side(num_requests: int, seconds: Sequence[float], costs: CostProfile, emitted: list[int]) -> Experience:
    """Concurrent requests with the given draft time in each cycle."""
    drafter = Experience()
    together = [sizer(costs, drafter) for _ in range(num_requests)]
    for each in together:
        each.begin()
    for draft_seconds in seconds:
        for each in together:
            pauses(each, CHAIN, draft_seconds, 1, emitted)
    return drafter


@pytest.mark.parametrize("num_requests", [1, 2, 8, 32])
def test_simultaneous_first_drafts_do_not_cause_pause(num_requests: int) -> None:
    """Each of them reads its prompt, or all of them wait for the compilation of a kernel."""
    drafter = side_by_side(num_requests, [50.0, 0.01, 0.01], FREE, [*CHAIN.tokens[1:], 9])
    assert drafter.watch.pause == 1
    assert drafter.draft_seconds <= 0.01


def test_draft_time_is_a_mean_of_cycles_with_and_without_draft_passes() -> None:
    drafter = side_by_side(1, [0.1, *[0.1, 2.0] * 50], FREE, [*CHAIN.tokens[1:], 9])
    assert 0.7 < drafter.draft_seconds < 1.4
    one_slow = side_by_side(1, [*[0.1] * 20, 50.0], FREE, [*CHAIN.tokens[1:], 9])
    assert one_slow.draft_seconds < 0.2


@pytest.mark.parametrize("num_requests", [2, 8, 32])
def test_failed_retry_of_a_batch_extends_pause_once(num_requests: int) -> None:
    for num_cycles in range(2, 8):
        alone, together = (side_by_side(n, [5.0] * num_cycles, STEEP, [999]) for n in (1, num_requests))
        assert alone.watch.pause <= together.watch.pause <= 2 * alone.watch.pause < MAX_PAUSE


def test_profitable_drafting_resumes() -> None:
    drafter = Experience()
    pauses(sizer(drafter=drafter), CHAIN, 5.0, 200, [999])
    pauses(sizer(drafter=drafter), CHAIN, 0.0, 40 * MAX_PAUSE, [999])  # it has become fast
    assert drafter.watch.pause == 1
    later = sizer(drafter=drafter)
    later.begin()
    assert later.wanted > 1


def test_cheap_or_profitable_drafts_are_never_paused() -> None:
    plain = HOPELESS.of(1, 16)[0]
    assert not any(pauses(sizer(HOPELESS), CHAIN, 0.9 * MIN_DRAFT_COST * plain, 100, [999]))  # nothing is verified
    right = [*CHAIN.tokens[1:], 999]
    assert not any(pauses(play(sizer(FREE), [7] * 100), CHAIN, 0.5 * float(FREE.of(1, 16)[0]), 100, right))


def test_one_slow_draft_does_not_cause_pause() -> None:
    """A draft model reads its prompt or compiles its kernels only once."""
    right = [*CHAIN.tokens[1:], 999]
    by = play(sizer(FREE), [7] * 100)
    assert pauses(by, CHAIN, 500.0, 1, right) == [False]
    assert not any(pauses(by, CHAIN, 0.5, 100, right))


@pytest.mark.parametrize("num_requests", [1, 8])
def test_speculation_that_never_pays_is_hardly_tried(num_requests: int) -> None:
    """Drafting takes 5% to 10% of the time of a token, every further position twice as long as the first."""
    costs, drafter = LiveCosts(HOPELESS), Experience()
    sizers = [Sizer(costs, drafter) for _ in range(num_requests)]
    num_tries = [0] * num_requests
    for _ in range(400):
        tried = [index for index, sizer in enumerate(sizers) if sizer.wanted > 1]
        for index in tried:
            num_tries[index] += 1
        load = Load(num_requests - len(tried), float(num_requests - len(tried)))
        drafts = drafts_of([sizers[index] for index in tried], [CHAIN] * len(tried), 0.1)
        assert all(len(tree) == 1 for tree in (cut_all(drafts, load) if tried else []))
        root = DraftTree.root_only(0)
        offered = [CHAIN if index in tried else root for index in range(num_requests)]
        note_outcomes(sizers, offered, [root] * num_requests, [CHAIN.tokens[1:3]] * num_requests)
    assert max(num_tries) < 200
