"""The size of a tree with ``budget="auto"``: nodes are added while they gain more than they cost.

A node's gain is the chance that it is accepted (chances.py); what it costs follows from the times of passes (live.py,
costs.py). Each cycle keeps the nodes
with the largest chances, as many as maximise expected tokens per second; only the root, which is plain decoding, where
guesses do not pay. Nodes that were offered and not verified are counted too, as far as the emitted tokens tell.

Drafting itself takes time: next to nothing from tables, more than a pass with a draft model. A drafter that does not
pay is paused, tried again, and paused for longer if it still does not pay. A new request continues the pause of the
last one, so that short requests also reach its end.

Drawn children must not be dropped because of their token. A drawn tree is cut after a number of nodes that was fixed
before it was drawn, from how often the 1st, 2nd, ... node of such trees was accepted so far.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from draftwood.sizing.chances import (
    DISCOUNT,
    AcceptanceRecord,
    Choice,
    Kind,
    PassCosts,
    best_size,
    followed,
    new_guesses,
)
from draftwood.sizing.costs import CostProfile
from draftwood.sizing.live import LiveCosts
from draftwood.tree import DraftTree

REQUEST_DECAY, DRAFTER_DECAY = 0.96, 0.995  # per trial of a kind
DRAWN = "drawn"  # in place of a source: nodes of drawn trees are known by their index only
PLACES = (2, 4, 8, 16, 32, 64, 128)  # bucket edges of node indices
FIRST_PLACE, NEXT_PLACES = 0.5, 0.6  # priors: of the first bucket, and of each next one relative to the one before
DRAFT_DECAY = 0.8
MIN_WANTED = 8  # nodes that a drafter may always propose
MAX_SECOND_COST = 1.3  # cost of two positions over one up to which prompt logits pay
MIN_DRAFT_COST = 0.2  # of a plain pass: cheaper drafting is never paused
MAX_PAUSE = 64  # cycles
COST_STEP = 64  # positions: granularity of cost look-ups, in context and in size


class Load(NamedTuple):
    """Positions in a pass and expected tokens from it."""

    positions: int = 0
    tokens: float = 0.0


NO_LOAD = Load()


def loads_of_others(loads: Sequence[Load]) -> list[Load]:
    """For each load, the sum of all others."""
    positions = sum(load.positions for load in loads)
    tokens = [load.tokens for load in loads]
    before = accumulate(tokens, initial=0.0)
    after = list(accumulate(reversed(tokens), initial=0.0))[-2::-1]
    return [
        Load(positions - load.positions, one + other) for load, one, other in zip(loads, before, after, strict=False)
    ]


class Experience:
    """What all requests of a drafter have shown; new ones start from it."""

    def __init__(self, *, is_calibrated: bool = False) -> None:
        """``is_calibrated``: the drafter's own estimates are learned acceptance rates."""
        self.record = AcceptanceRecord(DRAFTER_DECAY, is_calibrated=is_calibrated)
        self.draft_seconds = 0.0  # per cycle, running mean
        self.pause = 1  # length of the next pause, in cycles
        self.pause_left = 0  # cycles left of the current pause

    def note_draft(self, seconds: float) -> None:
        self.draft_seconds += (1.0 - DRAFT_DECAY) * (seconds - self.draft_seconds)


class Sizer:
    """Cuts the trees of one request to the size that pays best."""

    def __init__(self, costs: LiveCosts, drafter: Experience) -> None:
        self._costs = costs
        self._version = costs.version  # of the cached seconds
        self._largest = costs.largest
        self._drafter = drafter
        self._record = AcceptanceRecord(REQUEST_DECAY, drafter.record)
        self._guesses = new_guesses(self._record, drafter.record)
        self._known_seconds: dict[tuple[int, int], array[float]] = {}
        self._fixed_seconds: dict[tuple[int, int], array[float]] = {}  # for drawn trees
        self.expected = 1.0  # tokens of the last cut tree
        self._wanted = MIN_WANTED
        self._last_draft_seconds = 0.0
        self._pause = 0  # cycles left without drafts
        self._next_pause = 1

    def begin(self, *, pausing: bool = True) -> None:
        """Starts the request; ``pausing``: continue a pause of earlier requests."""
        self._last_draft_seconds = self._drafter.draft_seconds
        self._next_pause = self._drafter.pause
        self._pause = self._drafter.pause_left if pausing else 0

    @property
    def wanted(self) -> int:
        """How many nodes the drafter should propose."""
        return 1 if self._pause else min(self._largest, self._wanted)

    @property
    def reads_prompts(self) -> bool:
        """Whether computing logits of the prompt pays: drafters learn alternatives from them, which help only where a
        second position is cheap."""
        one, two = self._seconds(2, 0)[:2]
        return two <= MAX_SECOND_COST * one

    def cut(self, tree: DraftTree, context: int, draft_seconds: float, load: Load) -> DraftTree:
        """The part of the tree that pays, after ``context`` positions and beside the ``load`` of other requests."""
        kept, self.expected = self._choice(tree, context, load)
        if len(tree) > 1:  # a drafter without guesses says nothing about sizes
            # If all nodes paid, more might; else ask for somewhat more than was used, so that trees can grow.
            whole = len(kept) == len(tree)
            self._wanted = self._largest if whole else max(MIN_WANTED, 3 * len(kept))
        # Ignore single slow drafts: a draft model reads its prompt first, and kernels may be compiled.
        self._drafter.note_draft(min(draft_seconds, self._last_draft_seconds))
        self._last_draft_seconds = draft_seconds
        if not tree.proposals:
            self._weigh_drafting(len(kept), context, load)
        return tree.select(kept)

    def note(self, offered: DraftTree, verified: DraftTree, emitted: Sequence[int]) -> None:
        """Counts one cycle: the offered tree, the part that was verified, and the emitted tokens."""
        if self._pause:
            self._pause = self._drafter.pause_left = self._pause - 1
        if offered.proposals:
            self._note_places(offered, len(verified), emitted)
        elif len(offered) > 1:
            self._guesses.note(offered, emitted)

    def _weigh_drafting(self, size: int, context: int, load: Load) -> None:
        """Pauses the drafter if ``size`` positions and their drafting yield fewer tokens per second than none."""
        seconds = self._seconds(load.positions + size, context)
        plain = seconds[load.positions]
        drafting, drafter = self._drafter.draft_seconds, self._drafter
        drafted = (self.expected + load.tokens) / (seconds[load.positions + size - 1] + drafting)
        if drafting < MIN_DRAFT_COST * plain or drafted >= (1.0 + load.tokens) / plain:
            self._next_pause, drafter.pause_left = 1, 0
        else:
            self._pause, self._next_pause = self._next_pause + 1, min(2 * self._next_pause, MAX_PAUSE)
        drafter.pause = self._next_pause

    def _choice(self, tree: DraftTree, context: int, load: Load) -> Choice:
        if not tree.proposals:
            seconds = self._seconds(load.positions + len(tree), context)
            return self._guesses.best_part(
                tree, PassCosts(seconds, load.positions, load.tokens, self._drafter.draft_seconds)
            )
        chances = [1.0, *(DISCOUNT * chance for chance in self._chances_by_place())]
        # Draws must not depend on times of this run, or a seed would not determine the output.
        seconds = _look_up(self._fixed_seconds, self._costs.fixed, load.positions + len(chances), context)
        size, expected = best_size(chances, PassCosts(seconds, load.positions, load.tokens, 0.0))
        return Choice(range(min(size, len(tree))), expected)

    def note_pass(self, positions: int, context: int, seconds: float) -> None:
        """Learns from the time of a pass for this request alone."""
        if not self._costs.is_measured:
            self._costs.note(positions, seconds / self._seconds(positions, context)[positions - 1])

    def _seconds(self, positions: int, context: int) -> array[float]:
        """Seconds of passes over 1, 2, ... positions."""
        if self._version != self._costs.version:
            self._version = self._costs.version
            self._known_seconds.clear()
        return _look_up(self._known_seconds, self._costs.profile, positions, context)

    def _note_places(self, offered: DraftTree, num_verified: int, emitted: Sequence[int]) -> None:
        """The outcome of nodes after the cut is known if their parent was verified."""
        right_nodes = followed(offered, emitted)
        outcomes: dict[int, list[bool]] = {}  # by bucket
        for node, parent in enumerate(offered.parents[1:], start=1):
            if parent < num_verified:
                outcomes.setdefault(bisect(PLACES, node), []).append(node in right_nodes)
        for place, right in outcomes.items():
            self._record.note(_place_kind(place), sum(right) / len(right))

    def _chances_by_place(self) -> list[float]:
        """Chances of the 1st, 2nd, ... node of a drawn tree."""
        rates: list[float] = []
        believed = FIRST_PLACE
        for place in range(len(PLACES) + 1):
            rates.append(self._record.rate(_place_kind(place), believed))
            believed = NEXT_PLACES * rates[-1]
        return [rates[bisect(PLACES, node)] for node in range(1, self._largest)]


def _look_up(
    known: dict[tuple[int, int], array[float]], profile: CostProfile, positions: int, context: int
) -> array[float]:
    """Seconds of passes over 1, 2, ... positions; cached by context length in steps."""
    key = (-(-positions // COST_STEP), context // COST_STEP)
    if key not in known:
        known[key] = array("d", profile.of(key[0] * COST_STEP, context).tolist())
    return known[key]


def _place_kind(place: int) -> Kind:
    return DRAWN, place, 0, False
