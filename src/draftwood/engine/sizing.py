"""How large a tree should be when the user leaves it to us: as long as the next node brings more than it costs.

What a node brings is the chance that it is accepted: the product, along its path, of how often guesses of its kind were
right when the guess before them was. A kind is the source, what the source itself thought of the guess, the depth, and
for first guesses whether the last one was right. Its rate is learned as the request runs, starting from what earlier
requests of the drafter showed, and at the very first from most of the source's own estimate. What a node costs was
measured (costs.py). A cycle takes the nodes with the largest chances, as many as make expected tokens per second
highest: none but the root, which is plain decoding, where guesses do not pay. Guesses that were offered and not
verified are counted too, as far as the emitted tokens tell.

Drawn children must not be dropped for the token they carry. A tree that has some is cut behind a number of nodes that
was settled before it was drawn, from how often the 1st, 2nd, ... node of such trees was accepted so far.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from draftwood.engine.costs import CostProfile
from draftwood.tree import DraftTree

Kind = tuple[str, int, int, bool]

ESTIMATES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9)  # edges between what sources think of a guess
DEEP = 3  # from this depth on all are alike
TRUST = 0.7  # sources are surer than they are right: so much of an estimate is believed until it was tried
PRIOR_TRIALS = 3.0  # how much experience what is believed beforehand is worth
REQUEST_DECAY, DRAFTER_DECAY = 0.96, 0.995  # per trial of a kind: what is long ago counts less
DRAWN = "drawn"  # instead of a source: nodes of drawn trees are known by their place alone
PLACES = (2, 4, 8, 16, 32, 64, 128)  # edges between places that are counted together
FIRST_PLACE, NEXT_PLACES = 0.5, 0.6  # what is believed of the first, and of others beside those before them
DRAFT_DECAY = 0.9
FEWEST_WANTED = 8  # nodes that a drafter offers at least
HOPE = 0.93  # what a chance is taken for: chances are uncertain, costs are not
CHEAP = 1.3  # times one position, that two of them may cost for prompts to be read for guesses
SAME_COST = 64  # positions of context that make no difference


class Load(NamedTuple):
    """What the other requests of a pass contribute to it."""

    positions: int = 0
    tokens: float = 0.0


def beside(loads: Sequence[Load], number: int) -> Load:
    """All loads but the one of that number."""
    others = [load for index, load in enumerate(loads) if index != number]
    return Load(sum(load.positions for load in others), sum(load.tokens for load in others))


class AcceptanceRecord:
    """How often guesses of a kind were right, given that the one before them was."""

    def __init__(self, decay: float, before: AcceptanceRecord | None = None) -> None:
        """``before``: where beliefs come from until there is experience."""
        self._decay = decay
        self._before = before
        self._counts: dict[Kind, tuple[float, float]] = {}  # trials, hits; decayed

    def rate(self, kind: Kind, estimate: float) -> float:
        """``estimate``: what is believed where nobody has any experience."""
        believed = estimate if self._before is None else self._before.rate(kind, estimate)
        trials, hits = self._counts.get(kind, (0.0, 0.0))
        return min(1.0, (hits + PRIOR_TRIALS * believed) / (trials + PRIOR_TRIALS))

    def note(self, kind: Kind, right: float) -> None:
        """``right``: 1 or 0, or the share of several that are counted as one."""
        trials, hits = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = (trials * self._decay + 1.0, hits * self._decay + right)
        if self._before is not None:
            self._before.note(kind, right)


class Sizer:
    """Cuts one request's trees to the size that pays best."""

    def __init__(self, costs: CostProfile, drafter_record: AcceptanceRecord) -> None:
        self._costs = costs
        self._record = AcceptanceRecord(REQUEST_DECAY, drafter_record)
        self._last_was_right = False
        self._draft_seconds = 0.0  # of a cycle, running mean: paid whatever the size
        self._known_seconds: dict[tuple[int, int], list[float]] = {}
        self._kinds_of: DraftTree | None = None
        self._known_kinds: list[Kind] = []
        self.expected = 1.0  # tokens of the cycle that was cut last
        self._wanted = FEWEST_WANTED

    @property
    def wanted(self) -> int:
        """How large a tree the drafter should offer."""
        return min(self._costs.largest, self._wanted)

    @property
    def reads_prompts(self) -> bool:
        """Whether logits of the prompt are worth their time: what drafters learn there are guesses of the second rank,
        which are of use only where another position is cheap."""
        one, two = self._seconds(2, 0)
        return two <= CHEAP * one

    def cut(self, tree: DraftTree, context: int, draft_seconds: float, load: Load) -> DraftTree:
        """The part of the tree that pays, with ``context`` positions behind it and ``load`` beside it."""
        drawn = bool(tree.proposals)
        chances = [1.0, *(HOPE * chance for chance in (self._chances_by_place() if drawn else self._chances(tree)))]
        nodes: Sequence[int] = range(len(chances))
        if not drawn:
            nodes = sorted(nodes, key=chances.__getitem__, reverse=True)  # of equals the earlier one first
        tokens = list(accumulate((chances[node] for node in nodes), initial=load.tokens))[1:]  # [nodes] by size
        seconds = self._seconds(load.positions + len(tokens), context)[load.positions :]
        # Times differ from run to run; nothing that is drawn may depend on them, or a seed would not fix the output.
        drafting = 0.0 if drawn else self._draft_seconds
        rates = [count / (time + drafting) for count, time in zip(tokens, seconds, strict=True)]
        size = rates.index(max(rates)) + 1
        kept = range(min(size, len(tree))) if drawn else sorted(nodes[:size])
        self.expected = 1.0 + (tokens[size - 1] - tokens[0]) / HOPE
        if len(tree) > 1:  # a drafter that had no guesses says nothing about sizes
            # Where all of them paid, more might; else some more than was used, so that it can grow.
            whole = len(kept) == len(tree)
            self._wanted = self._costs.largest if whole else max(FEWEST_WANTED, 3 * len(kept))
        self._draft_seconds += (1.0 - DRAFT_DECAY) * (draft_seconds - self._draft_seconds)
        return tree.part(kept)

    def note(self, offered: DraftTree, verified: DraftTree, emitted: Sequence[int]) -> None:
        """Counts one cycle: the tree the drafter offered, the part that was verified, and what was emitted."""
        if offered.proposals:
            self._note_places(offered, len(verified), emitted)
        elif len(offered) > 1:
            self._note_kinds(offered, emitted)

    def _seconds(self, positions: int, context: int) -> list[float]:
        """Of passes over 1, 2, ... ``positions``; looked up once for all contexts of about that length."""
        key = (positions, context // SAME_COST)
        if key not in self._known_seconds:
            self._known_seconds[key] = self._costs.of(positions, context).tolist()
        return self._known_seconds[key]

    def _note_kinds(self, offered: DraftTree, emitted: Sequence[int]) -> None:
        kinds = self._kinds(offered)  # as in the cut: what they depend on changes below
        children = offered.children()
        right_nodes = _followed(offered, children, emitted)
        for node in [0, *right_nodes][: len(emitted)]:
            for child in children[node]:
                self._record.note(kinds[child], child in right_nodes)
        self._last_was_right = bool(right_nodes)
        self._kinds_of = None

    def _note_places(self, offered: DraftTree, num_verified: int, emitted: Sequence[int]) -> None:
        """Of nodes behind the cut it is known whether they were right where their parent was verified."""
        right_nodes = _followed(offered, offered.children(), emitted)
        outcomes: dict[int, list[bool]] = {}  # by places that are counted together
        for node, parent in enumerate(offered.parents[1:], start=1):
            if parent < num_verified:
                outcomes.setdefault(bisect(PLACES, node), []).append(node in right_nodes)
        for place, right in outcomes.items():
            self._record.note(_place_kind(place), sum(right) / len(right))

    def _chances(self, tree: DraftTree) -> list[float]:
        """Of every node but the root to be accepted. One of several siblings at most is right: later ones get what
        earlier ones leave."""
        rate, parents, probs = self._record.rate, tree.parents, tree.probs
        chances, left = [1.0], [1.0] * len(tree)
        for node, kind in enumerate(self._kinds(tree)[1:], start=1):
            parent = parents[node]
            share = min(rate(kind, TRUST * probs[node]), left[parent])
            left[parent] -= share
            chances.append(chances[parent] * share)
        return chances[1:]

    def _chances_by_place(self) -> list[float]:
        """Of the 1st, 2nd, ... node of a drawn tree, however large it may be."""
        rates: list[float] = []
        believed = FIRST_PLACE
        for place in range(len(PLACES) + 1):
            rates.append(self._record.rate(_place_kind(place), believed))
            believed = NEXT_PLACES * rates[-1]
        return [rates[bisect(PLACES, node)] for node in range(1, self._costs.largest)]

    def _kinds(self, tree: DraftTree) -> list[Kind]:
        """Of all nodes. A cycle asks twice, when it cuts and when it counts, and the answer is the same."""
        if self._kinds_of is not tree:
            right = self._last_was_right
            self._kinds_of, self._known_kinds = (
                tree,
                [
                    (source, bisect(ESTIMATES, prob), min(depth, DEEP), right and depth == 1)
                    for source, prob, depth in zip(tree.sources, tree.probs, tree.depths, strict=True)
                ],
            )
        return self._known_kinds


def _followed(tree: DraftTree, children: Sequence[Sequence[int]], emitted: Sequence[int]) -> list[int]:
    """The nodes below the root that the emitted tokens lead to, in order."""
    path = [0]
    for token in emitted:
        following = [child for child in children[path[-1]] if tree.tokens[child] == token]
        if not following:
            break
        path += following
    return path[1:]


def _place_kind(place: int) -> Kind:
    return DRAWN, place, 0, False
