"""A blend with what a draft model finds by a search of its own, without the host between its passes.

Where a draft model runs whole searches (a GPU), asking after each pass which nodes come next would take longer than the
passes. So it runs a beam search of some levels first, and then one tree is blended from all that it predicted and from
the other sources.

How many levels: as many as gain more tokens than the same time gains elsewhere. What a level promises is known from
the tree: the chances of the nodes that it would not have had without the level. That depends on how much the other
sources know, so it is recorded by the tokens that the tree without the draft model promises. Whether promises are kept
is known after the cycle: the tree without the draft model would have had a part of the accepted path. Texts differ in
that, so each request learns for itself how far to trust promises. All this takes a second tree, so only some drafts
look at it; those in between have as many levels as the last one that did. So has a search that the device starts right
after the target's pass, when the text is not known yet.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from draftwood.growth.blend import Blend, BlendLimits
from draftwood.growth.drawn import Ids, Probs
from draftwood.growth.expanding import PassRecord
from draftwood.growth.neural import Frontier, GrowingTree, GrowthOptions, Search, Times, make_growth
from draftwood.growth.trust import Trust
from draftwood.growth.worth import Worth
from draftwood.targets import Found
from draftwood.tree import DraftTree

MOST_LEVELS = 7
WIDTH = 10  # nodes per level, and predictions of each
PROMISES = (1.4, 1.8, 2.4, 3.2, 4.5, 7.0)  # tokens of a tree without the draft model: edges of buckets
FIRST_GAIN, NEXT_GAIN = 0.5, 0.75  # priors: tokens that the first level gains, and each level of the one before
SMOOTHING = 0.1
LOOK_EVERY = 4  # drafts
TRY_EVERY, MAX_TRY_EVERY = 6, 96  # looks after which all levels or none are tried again, fewer and fewer times

Path = tuple[int, ...]  # tokens below the root


class PredictedRows(Protocol):
    """Takes what the draft model predicts, as hints for the blend."""

    name: str  # of the source

    def add(self, tail: Sequence[int], ids: Ids, scores: Probs, /) -> None:
        """Predictions [K], best first, after a text that ends with ``tail``."""

    def add_found(self, tail: Sequence[int], found: Found, /) -> None:
        """Those after all nodes of a search below the text."""


class SearchRecord:
    """What levels of searches gained and took so far; requests share it."""

    def __init__(self) -> None:
        first = [FIRST_GAIN * NEXT_GAIN**level for level in range(MOST_LEVELS)]
        self._gains = [list(first) for _ in range(len(PROMISES) + 1)]  # of level 1, 2, ..., by what trees promise
        # By the number of requests, the power of two, and by whether drafts go ahead, which hides a part of their time.
        self._times: dict[tuple[int, bool], Times] = {}
        self._stays = {MOST_LEVELS: TRY_EVERY, 0: TRY_EVERY}  # looks until so many levels are tried
        self._left = dict(self._stays)
        self.floor = 0.0  # chance of nodes that are not worth their place, about

    def choose(self, times: Times, promises: Sequence[float], gains: Sequence[Sequence[float]]) -> None:
        """The levels of the next drafts, for requests whose trees promise so many tokens without any. ``gains``: what
        level 1, 2, ... gain for each."""
        if not times.rest:
            times.chosen = times.upcoming = MOST_LEVELS
            return
        expected = accumulate([sum(level) for level in zip(*gains, strict=True)], initial=sum(promises))
        rates = [tokens / (times.rest + times.draft(levels)) for levels, tokens in enumerate(expected)]
        times.chosen = max(range(MOST_LEVELS + 1), key=rates.__getitem__)
        times.upcoming = self._choose_trial(times.chosen)

    def _choose_trial(self, chosen: int) -> int:
        """The levels of the next draft: those chosen; now and then all, to see what they gain, or none, to see how long
        such a draft takes."""
        for levels in self._stays:
            if levels == chosen or (levels and chosen):
                self._stays[levels] = TRY_EVERY
            self._left[levels] = min(self._left[levels], self._stays[levels]) - 1
        due = [levels for levels, left in self._left.items() if left <= 0]
        if not due:
            return chosen
        self._left[due[0]] = self._stays[due[0]] = min(2 * self._stays[due[0]], MAX_TRY_EVERY)
        return due[0]

    def note_gains(self, promise: float, gains: Sequence[float]) -> None:
        """``gains``: of level 1, 2, ..., of a tree that promised so many tokens without them."""
        known = self.gains(promise)
        for level, gain in enumerate(gains):
            known[level] += SMOOTHING * (gain - known[level])

    def note_tree(
        self, grown: SearchedBlend, num_kept: int, emitted: Sequence[int], trust: Trust
    ) -> tuple[int, int] | None:
        """A tree was cut to ``num_kept`` nodes and verified; ``trust``: of its request. Returns how many tokens of the
        path it has, and how many the tree without the draft model, if that is known."""
        without = grown.without
        if without is None:
            return None
        tree, path = grown.tree(), emitted[:-1]  # which may have more tokens, such as those that a grammar forces
        values, found = tree.values(), (len(tree.follow(path)), len(without.tree.follow(path)))
        if grown.levels:
            self.note_gains(without.promise, grown.gains(without, values))
            promised = sum(self.gains(without.promise)[: grown.levels])
            trust.note(promised, found[0] - found[1])
        self.note_floor(values[num_kept] if num_kept < len(values) else min(self.floor, values[-1]))
        return found

    def note_floor(self, value: float) -> None:
        self.floor += SMOOTHING * (value - self.floor)

    def times_of(self, num_requests: int, *, goes_ahead: bool = False) -> Times:
        return self._times.setdefault((num_requests.bit_length(), goes_ahead), Times(MOST_LEVELS))

    def gains(self, promise: float) -> list[float]:
        """What level 1, 2, ... promise to a tree that promises so much without them."""
        return self._gains[bisect(PROMISES, promise)]


class DraftRecords:
    """What runs of a draft model gained and took: pass by pass, or by whole searches."""

    def __init__(self) -> None:
        self.passes, self.searches = PassRecord(), SearchRecord()
        self.trust, self.worth = Trust(), Worth()


class BlendedTree:
    """A tree with what it promises: the tokens of its nodes that are worth their place."""

    def __init__(self, tree: DraftTree, budget: int, floor: float) -> None:
        self.tree, values = tree, tree.values()
        # A further node would replace the last one of a full tree.
        self.floor = max(floor, values[-1]) if len(values) == budget else floor
        self.promise = sum([value for value in values if value >= self.floor])


class SearchedBlend:
    """One growing tree; the interface is that of ``growth.neural``."""

    width = WIDTH

    def __init__(
        self,
        blend: Blend,
        tail: Sequence[int],
        limits: BlendLimits,
        rows: PredictedRows,
        without: BlendedTree | None,
        levels: int,
    ) -> None:
        """``without``: the tree that the other sources make, if it is known. ``levels``: of the search; 0: none."""
        self._blend, self._tail, self._limits, self._rows, self.without = blend, tail, limits, rows, without
        self._beam = search_levels(tail[-1], limits.budget, levels)
        self._paths: list[Path] = []  # of the nodes that were run, one pass after the other
        self._found: Found | None = None
        self._tree = None if levels or without is None else without.tree
        self.levels = levels

    @property
    def search(self) -> Search | None:
        return self._beam.search

    def frontier(self) -> Frontier | None:
        return self._beam.frontier()

    def grow(self, token_ids: Ids, probs: Probs) -> None:
        """A pass by which the beam grows, where the draft model does not search by itself."""
        frontier = self._beam.frontier()
        assert frontier is not None
        for token, parent, ids, row in zip(*frontier, token_ids, probs, strict=True):
            path = () if parent < 0 else (*self._paths[parent], token)
            self._paths.append(path)
            self._rows.add([*self._tail, *path], ids, row)
        self._beam.grow(token_ids, probs)

    def take(self, found: Found) -> None:
        """What the draft model found by itself."""
        self._found = found
        self._rows.add_found(self._tail, found)

    def tree(self) -> DraftTree:
        if self._tree is None:
            self._tree = self._blend.tree(self._tail, self._limits)
        return self._tree

    @property
    def expansion_of(self) -> list[int]:
        paths = self._paths if self._found is None else paths_found(self._found)
        numbers = {path: number for number, path in enumerate(paths) if path is not None}
        return [numbers.get(path, -1) for path in self.tree().paths()]

    def gains(self, without: BlendedTree, values: Sequence[float]) -> list[float]:
        """Of each level: the chances of the nodes that are in the tree because of it. ``values``: of all nodes."""
        tree, floor, before = self.tree(), without.floor, set(without.tree.paths())
        gains, levels = [0.0] * self.levels, list[int]()  # the deepest level that predicted a node of its path
        is_predicted = {source: self._rows.name in source.split("+") for source in set(tree.sources)}
        for path, parent, source, value in zip(tree.paths(), tree.parents, tree.sources, values, strict=True):
            level = len(path) if is_predicted[source] else levels[parent] if path else 0
            levels.append(level)
            if 0 < level <= self.levels and value > floor and path not in before:
                gains[level - 1] += value - floor
        return gains


def search_levels(root: int, budget: int, levels: int) -> GrowingTree:
    """The growth by which the draft model searches so many levels."""
    return make_growth("beam", root, budget if levels else 1, GrowthOptions(depth=levels, top_k=WIDTH))


class SearchedDraft:
    """One draft for a batch: how many levels it has, how long it takes, and what comes of it."""

    def __init__(
        self,
        record: SearchRecord,
        num_requests: int,
        *,
        is_timed: bool,
        goes_ahead: bool = False,
        is_ahead: bool = False,
    ) -> None:
        """``is_ahead``: its search is launched before the text is known. ``goes_ahead``: it would be, if it had any
        levels and the draft model had read all of the text before."""
        self._record, self._times = record, record.times_of(num_requests, goes_ahead=goes_ahead or is_ahead)
        self._is_timed, self._is_ahead = is_timed, is_ahead
        self.levels = self._times.upcoming if is_timed else MOST_LEVELS
        self.looks = False
        self._has_cycled = False
        self._is_whole = False  # whether times begin where the last cycle ended
        self._since = 0.0

    def start(self, since: float | None = None) -> None:
        """The text is known now. ``since``: when the time of the draft begins; None: now. Where searches may be
        launched ahead, it is the end of the last cycle for all drafts, so that their times can be compared."""
        times = self._times
        times.num_chosen += 1
        is_trial = self.levels > times.chosen
        times.upcoming = times.chosen
        self.looks = self._is_timed and (not times.rest or times.num_chosen >= LOOK_EVERY or is_trial)
        self._is_whole = since is not None
        self._since = time.perf_counter() if since is None else since

    def look(self, promises: Sequence[float], gains: Sequence[Sequence[float]]) -> None:
        """By what trees of the other sources promise, and levels gain."""
        self._times.num_chosen = 0
        times = self._times
        self._record.choose(times, promises, gains)
        if not self._is_ahead:
            # All levels are tried in this draft, none in the next one: the time of this one includes the look.
            self.levels = times.upcoming or times.chosen
            times.upcoming = times.chosen if times.upcoming else 0
        if not self._is_whole:
            self._since = time.perf_counter()

    def end(self, num_run: int, *, counts: bool = True) -> None:
        """The trees are ready. ``num_run``: levels, fewer than were chosen if no request could run them. ``counts``:
        later drafts will take about as long."""
        now = time.perf_counter()
        # The look took time too, and so did a search that the device began late.
        counts = counts and not (self._is_whole and (self.looks or (num_run and not self._is_ahead)))
        if counts and (num_run or not (self.levels or self.looks)):
            self._times.note_draft(num_run, now - self._since)
        self._since = now

    def note_cycle(self) -> None:
        """One of the trees was verified."""
        if not self._has_cycled:
            self._has_cycled = True
            self._times.note_rest(time.perf_counter() - self._since)


def paths_found(found: Found) -> list[Path | None]:
    """Of the nodes of a search in the order in which they were run, the root first; None: there is none."""
    picks, tokens = found.picks.tolist(), found.tokens.tolist()
    paths: dict[int, Path] = {0: ()}
    for node, pick in enumerate(picks):
        if pick >= 0:
            paths[node] = (*paths[pick // found.best], tokens[pick])
    return [(), *[paths.get(node) for node in range(found.width, len(picks))]]
