"""How large a tree should be when the user leaves it to us: as long as the next node brings more than it costs.

What a node brings is the chance that it is accepted (acceptance.py). What it costs was measured (costs.py). A cycle
takes the nodes with the largest chances, as many as make expected tokens per second highest: none but the root, which
is plain decoding, where guesses do not pay. Guesses that were offered and not verified are counted too, as far as the
emitted tokens tell.

Drafting itself costs time, next to nothing from tables, and more than a pass where a draft model runs. Where that does
not pay, the drafter is not asked for a while, then tried again, and left alone for longer if it was in vain. A new
request goes on with the pause that the last one is in, so that short requests come to its end as well.

Drawn children must not be dropped for the token they carry. A tree that has some is cut behind a number of nodes that
was settled before it was drawn, from how often the 1st, 2nd, ... node of such trees was accepted so far.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from draftwood.sizing.chances import HOPE, AcceptanceRecord, Choice, Kind, Pass, best_size, followed, new_guesses
from draftwood.sizing.costs import CostProfile
from draftwood.tree import DraftTree

__all__ = ["DRAFTER_DECAY", "REQUEST_DECAY", "AcceptanceRecord", "Experience", "Load", "Sizer", "beside"]

REQUEST_DECAY, DRAFTER_DECAY = 0.96, 0.995  # per trial of a kind: what is long ago counts less
DRAWN = "drawn"  # instead of a source: nodes of drawn trees are known by their place alone
PLACES = (2, 4, 8, 16, 32, 64, 128)  # edges between places that are counted together
FIRST_PLACE, NEXT_PLACES = 0.5, 0.6  # what is believed of the first, and of others beside those before them
DRAFT_DECAY = 0.8
FEWEST_WANTED = 8  # nodes that a drafter offers at least
CHEAP = 1.3  # times one position, that two of them may cost for prompts to be read for guesses
DEAR = 0.2  # of a plain pass: drafting that takes less is never left out
LONGEST_PAUSE = 64  # cycles
SAME_COST = 64  # positions of context that make no difference; and costs are looked up for so many at once


class Load(NamedTuple):
    """What the other requests of a pass contribute to it."""

    positions: int = 0
    tokens: float = 0.0


ALONE = Load()


def beside(loads: Sequence[Load]) -> list[Load]:
    """For each of the loads all others together."""
    positions = sum(load.positions for load in loads)
    tokens = [load.tokens for load in loads]
    before = accumulate(tokens, initial=0.0)
    behind = list(accumulate(reversed(tokens), initial=0.0))[-2::-1]
    return [
        Load(positions - load.positions, one + other) for load, one, other in zip(loads, before, behind, strict=False)
    ]


class Experience:
    """What the requests of a drafter show, and where new ones begin."""

    def __init__(self) -> None:
        self.record = AcceptanceRecord(DRAFTER_DECAY)
        self.draft_seconds = 0.0  # of a cycle, running mean: paid whatever the size
        self.pause = 1  # cycles that drafting is left out for when it is next found not to pay
        self.pause_left = 0  # of the pause that a request was last seen in

    def note_draft(self, seconds: float) -> None:
        self.draft_seconds += (1.0 - DRAFT_DECAY) * (seconds - self.draft_seconds)


class Sizer:
    """Cuts one request's trees to the size that pays best."""

    def __init__(self, costs: CostProfile, drafter: Experience) -> None:
        self._costs = costs
        self._largest = costs.largest
        self._drafter = drafter
        self._record = AcceptanceRecord(REQUEST_DECAY, drafter.record)
        self._guesses = new_guesses(self._record, drafter.record)
        self._known_seconds: dict[tuple[int, int], array[float]] = {}
        self.expected = 1.0  # tokens of the cycle that was cut last
        self._wanted = FEWEST_WANTED
        self._last_draft_seconds = 0.0
        self._pause = 0  # cycles without drafts that are left
        self._next_pause = 1

    def begin(self, *, pausing: bool = True) -> None:
        """The request starts to run; ``pausing``: with what is left of a pause, if drafting did not pay last."""
        self._last_draft_seconds = self._drafter.draft_seconds
        self._next_pause = self._drafter.pause
        self._pause = self._drafter.pause_left if pausing else 0

    @property
    def wanted(self) -> int:
        """How large a tree the drafter should offer."""
        return 1 if self._pause else min(self._largest, self._wanted)

    @property
    def reads_prompts(self) -> bool:
        """Whether logits of the prompt are worth their time: what drafters learn there are guesses of the second rank,
        which are of use only where another position is cheap."""
        one, two = self._seconds(2, 0)[:2]
        return two <= CHEAP * one

    def cut(self, tree: DraftTree, context: int, draft_seconds: float, load: Load) -> DraftTree:
        """The part of the tree that pays, with ``context`` positions behind it and ``load`` beside it."""
        kept, self.expected = self._choice(tree, context, load)
        if len(tree) > 1:  # a drafter that had no guesses says nothing about sizes
            # Where all of them paid, more might; else some more than was used, so that it can grow.
            whole = len(kept) == len(tree)
            self._wanted = self._largest if whole else max(FEWEST_WANTED, 3 * len(kept))
        # Not its first one, nor a single slow one: a draft model reads its prompt then, or kernels are compiled.
        self._drafter.note_draft(min(draft_seconds, self._last_draft_seconds))
        self._last_draft_seconds = draft_seconds
        if not tree.proposals:
            self._weigh_drafting(len(kept), context, load)
        return tree.select(kept)

    def note(self, offered: DraftTree, verified: DraftTree, emitted: Sequence[int]) -> None:
        """Counts one cycle: the tree the drafter offered, the part that was verified, and what was emitted."""
        if self._pause:
            self._pause = self._drafter.pause_left = self._pause - 1
        if offered.proposals:
            self._note_places(offered, len(verified), emitted)
        elif len(offered) > 1:
            self._guesses.note(offered, emitted)

    def _weigh_drafting(self, size: int, context: int, load: Load) -> None:
        """Lets the drafter pause if ``size`` positions, with the time that drafting them took, yield less than one."""
        seconds = self._seconds(load.positions + size, context)
        plain = seconds[load.positions]
        drafting, drafter = self._drafter.draft_seconds, self._drafter
        drafted = (self.expected + load.tokens) / (seconds[load.positions + size - 1] + drafting)
        if drafting < DEAR * plain or drafted >= (1.0 + load.tokens) / plain:
            self._next_pause, drafter.pause_left = 1, 0
        else:
            self._pause, self._next_pause = self._next_pause + 1, min(2 * self._next_pause, LONGEST_PAUSE)
        drafter.pause = self._next_pause

    def _choice(self, tree: DraftTree, context: int, load: Load) -> Choice:
        if not tree.proposals:
            seconds = self._seconds(load.positions + len(tree), context)
            return self._guesses.best_part(
                tree, Pass(seconds, load.positions, load.tokens, self._drafter.draft_seconds)
            )
        chances = [1.0, *(HOPE * chance for chance in self._chances_by_place())]
        seconds = self._seconds(load.positions + len(chances), context)
        # Times differ from run to run; nothing that is drawn may depend on them, or a seed would not fix the output.
        size, expected = best_size(chances, Pass(seconds, load.positions, load.tokens, 0.0))
        return Choice(range(min(size, len(tree))), expected)

    def _seconds(self, positions: int, context: int) -> array[float]:
        """Of passes over 1, 2, ... ``positions`` and some more; looked up once for contexts of about that length."""
        key = (-(-positions // SAME_COST), context // SAME_COST)
        if key not in self._known_seconds:
            self._known_seconds[key] = array("d", self._costs.of(key[0] * SAME_COST, context).tolist())
        return self._known_seconds[key]

    def _chances(self, tree: DraftTree) -> list[float]:
        return self._guesses.chances(tree)

    def _note_places(self, offered: DraftTree, num_verified: int, emitted: Sequence[int]) -> None:
        """Of nodes behind the cut it is known whether they were right where their parent was verified."""
        right_nodes = followed(offered, emitted)
        outcomes: dict[int, list[bool]] = {}  # by places that are counted together
        for node, parent in enumerate(offered.parents[1:], start=1):
            if parent < num_verified:
                outcomes.setdefault(bisect(PLACES, node), []).append(node in right_nodes)
        for place, right in outcomes.items():
            self._record.note(_place_kind(place), sum(right) / len(right))

    def _chances_by_place(self) -> list[float]:
        """Of the 1st, 2nd, ... node of a drawn tree, however large it may be."""
        rates: list[float] = []
        believed = FIRST_PLACE
        for place in range(len(PLACES) + 1):
            rates.append(self._record.rate(_place_kind(place), believed))
            believed = NEXT_PLACES * rates[-1]
        return [rates[bisect(PLACES, node)] for node in range(1, self._largest)]


def _place_kind(place: int) -> Kind:
    return DRAWN, place, 0, False
