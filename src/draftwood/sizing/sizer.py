"""The sizes of trees with ``budget="auto"``: nodes are added while they gain more than they cost.

A node's gain is the chance that it is accepted (chances.py); what it costs follows from the times of passes and of the
host's work (live.py, costs.py). Each cycle keeps the nodes with the largest chances among those of all requests, as
many as maximise expected tokens per second (cutting.py); only roots, which is plain decoding, where guesses do not pay.
Nodes that were offered and not verified are counted too, as far as the emitted tokens tell.

Drafting and learning take time: little from tables, more than a pass with a draft model. A request whose drafts do not
pay pauses, tries again, and pauses for longer if they still do not pay (watch.py).

Drawn children must not be dropped because of their token. A drawn tree is cut after a number of nodes that was fixed
before it was drawn, from how often the 1st, 2nd, ... node of such trees was accepted so far.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections.abc import Sequence
from typing import NamedTuple

from draftwood.sizing.chances import DISCOUNT, AcceptanceRecord, CompiledGuesses, Kind, new_guesses, note_all
from draftwood.sizing.cutting import Cut, Offers, PassCosts, best_size, cut_trees
from draftwood.sizing.live import LiveCosts
from draftwood.sizing.watch import Watch, WatchRecord
from draftwood.tree import DraftTree

REQUEST_DECAY, DRAFTER_DECAY = 0.96, 0.995  # per trial of a kind
DRAWN = "drawn"  # in place of a source: nodes of drawn trees are known by their index only
PLACES = (2, 4, 8, 16, 32, 64, 128)  # bucket edges of node indices
FIRST_PLACE, NEXT_PLACES = 0.5, 0.6  # priors: of the first bucket, and of each next one relative to the one before
DRAFT_DECAY = 0.9
MAX_OUTLIER = 4.0  # times the mean: what a single slow draft counts at most
MIN_WANTED = 8  # nodes that a drafter may always propose
NEAR, SEEN = 1.2, 64  # more nodes may pay in cycles of up to so many times the time, at most so many in all
MAX_POSITION_COST = 0.01  # of a further position in a large pass, over a pass of one: up to which prompt logits pay
LOGITS_SHARE = 0.2  # of the time of a position: what its logits take
PASSES_SAVED = 0.02  # for each token of an answer, by what drafters learn from prompt logits
USUAL_ANSWER = 256  # tokens: most are not longer, whatever is allowed
SMALL_PASS = 4  # positions
MIN_DRAFT_COST = 0.01  # of a plain pass: cheaper drafting of all its requests counts as free
EDGE_RISE, EDGE_FALL = 1.2, 0.5  # of the chance up to which guesses are cut off: at most per cycle; if none was
MIN_EDGE = 1e-3  # it does not fall below
MARGIN = 0.5  # times that chance: what might still pay in the next cycle


class Load(NamedTuple):
    """Positions in a pass and expected tokens from it."""

    positions: int = 0
    tokens: float = 0.0


class Drafts(NamedTuple):
    """The trees of some requests before they are cut: one entry per request in every column."""

    sizers: Sequence[Sizer]
    offers: Offers
    seconds: Sequence[float]  # that drafting took
    learning: Sequence[float]  # seconds that learning took in the cycle before
    were_ready: Sequence[bool]  # whether that says something about later drafts


class Experience:
    """What all requests of a drafter have shown; new ones start from it."""

    def __init__(self, *, is_calibrated: bool = False) -> None:
        """``is_calibrated``: the drafter's own estimates are learned acceptance rates."""
        self.record = AcceptanceRecord(DRAFTER_DECAY, is_calibrated=is_calibrated)
        self.draft_seconds = 0.0  # per cycle, running mean
        self.learn_seconds = 0.0  # likewise
        self.watch = WatchRecord()
        self.edge = MIN_EDGE  # guesses up to about this chance, as the drafter estimates it, were cut off lately

    def note_edge(self, least: float, most: float) -> None:
        """Of the guesses of a cycle, ``least`` is the lowest chance of one that was kept, ``most`` the highest of one
        that was cut off; 0: none was, so that even less likely ones might pay. It rises slowly: cycles differ."""
        seen = min(least, most) if most else EDGE_FALL * self.edge
        self.edge = max(min(seen, EDGE_RISE * self.edge), MIN_EDGE)

    def note_draft(self, drafting: float, learning: float) -> None:
        """Seconds of a cycle for a request."""
        self.draft_seconds = _follow(self.draft_seconds, drafting)
        self.learn_seconds = _follow(self.learn_seconds, learning)


class Sizer:
    """Cuts the trees of one request to the size that pays best."""

    __slots__ = (
        "_cost", "_costs", "_drafter", "_guesses", "_has_drafted", "_largest", "_record", "_wanted", "_watch",
        "expected",
    )  # fmt: skip

    def __init__(self, costs: LiveCosts, drafter: Experience) -> None:
        self._costs = costs
        self._largest = costs.largest
        self._drafter = drafter
        self._record = AcceptanceRecord(REQUEST_DECAY, drafter.record)
        self._guesses = new_guesses(self._record, drafter.record)
        self.expected = 1.0  # tokens of the last cut tree
        self._wanted = min(MIN_WANTED, self._largest)
        self._has_drafted = False
        self._watch = Watch(drafter.watch)
        self._cost: float | None = None  # of the guesses of this cycle, in tokens of plain decoding; None: no guesses

    def begin(self, *, pausing: bool = True) -> None:
        """Starts the request; ``pausing``: continue a pause of earlier requests."""
        self._watch.begin(pausing=pausing)

    @property
    def is_pausing(self) -> bool:
        return self._watch.pause_left > 0

    def note_rest(self) -> None:
        """Counts a cycle without drafts."""
        if self._watch.pause_left:
            self._watch.note(0)

    @property
    def wanted(self) -> int:
        """How many nodes the drafter should propose."""
        return 1 if self._watch.pause_left else self._wanted

    @property
    def wanted_awake(self) -> int:
        """The same if it must not pause."""
        return self._wanted

    @property
    def min_chance(self) -> float:
        """Chance of a path below which guesses are not worth growing: they would be cut off."""
        return MARGIN * self._drafter.edge

    def reads_prompt(self, num_tokens: int, max_tokens: int, num_requests: int) -> bool:
        """Whether computing logits of a prompt pays: drafters learn alternatives from them, which save a pass now and
        then. Where a large pass is limited by arithmetic, hundreds of rows take longer than that. And the requests of a
        batch share the passes that are saved, but not the prompts. Draws may follow from it, so it does not depend on
        times of this run."""
        seconds = self._costs.fixed_seconds(self._largest, 0)
        per_pass = seconds[0]
        per_position = (seconds[self._largest - 1] - per_pass) / max(self._largest - 1, 1)
        if per_position > MAX_POSITION_COST * per_pass:
            return False
        saved = PASSES_SAVED * min(max_tokens, USUAL_ANSWER) * per_pass / num_requests
        return LOGITS_SHARE * per_position * num_tokens <= saved

    def position_cost(self, context: int) -> float:
        """What a further position costs in a small pass, relative to a pass over one."""
        size = min(SMALL_PASS, self._largest)
        seconds = self._costs.seconds(size, context)
        return (seconds[size - 1] - seconds[0]) / (max(size - 1, 1) * seconds[0])

    def cut_drawn(self, drafts: Drafts, context: int, load: Load) -> DraftTree:
        """The first nodes of a tree with drawn children, of this request alone. ``load``: of the other requests.

        Draws must not depend on times of this run, or a seed would not determine the output.
        """
        ((tree, room, max_depth, _),) = zip(*drafts.offers, strict=True)
        chances = [1.0, *(DISCOUNT * chance for chance in self._chances_by_place())]
        seconds = self._costs.fixed_seconds(load.positions + len(chances), context)
        size, self.expected = best_size(chances, PassCosts(seconds, load.positions, load.tokens, 0.0))
        size = min(size, len(tree))
        self._want(len(tree), size)
        _note_drafts(drafts)
        return tree.first(min(size, room)).limit_depth(max_depth)

    def note(self, offered: DraftTree, verified: DraftTree, emitted: Sequence[int]) -> None:
        """Counts one cycle."""
        note_outcomes([self], [offered], [verified], [emitted])

    def _want(self, offered: int, kept: int, near: int = 0) -> None:
        """If all nodes paid, many more might; else ask for somewhat more than was used, so that trees can grow.
        ``near``: nodes that a hardly longer cycle has room for."""
        if offered > 1:
            more = 2 * kept if kept == offered else kept // 2
            least = self._wanted if kept == offered else MIN_WANTED  # the drafter may have had no more
            self._wanted = min(max(least, kept + max(more + 4, near)), self._largest)

    def note_pass(self, positions: int, context: int, seconds: float) -> None:
        """Learns from the time of a pass for this request alone."""
        if not self._costs.is_measured:
            self._costs.note(positions, seconds / self._costs.seconds(positions, context)[positions - 1])

    def note_host(self, num_requests: int, num_nodes: int, seconds: float) -> None:
        """Learns from the time that a cycle of ``num_requests`` took outside the pass."""
        self._costs.host.note(num_requests, num_nodes, seconds)

    def _note_places(self, offered: DraftTree, num_verified: int, emitted: Sequence[int]) -> None:
        """The outcome of nodes after the cut is known if their parent was verified."""
        right_nodes = offered.follow(emitted)
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


class CutDrafts(NamedTuple):
    """What was cut, and what that followed from."""

    drafts: Drafts
    cut: Cut
    load: Load
    seconds: array[float]  # of passes over 1, 2, ... positions
    per_request: float  # seconds outside the pass
    per_node: float  # likewise

    @property
    def sizers(self) -> Sequence[Sizer]:
        return self.drafts.sizers

    @property
    def trees(self) -> list[DraftTree]:
        return self.cut.trees

    def note(self) -> None:
        """Shows the sizers what was cut, before they see what came of it and before the next drafts."""
        sizers, (trees, expected, least, most) = self.sizers, self.cut
        _note_drafts(self.drafts)
        drafters = [sizer._drafter for sizer in sizers]
        for drafter in set(drafters):
            own = [index for index, other in enumerate(drafters) if other is drafter]
            drafter.note_edge(min([least[index] for index in own]), max([most[index] for index in own]))
        costs, near = self._bill(drafters)
        offered = self.drafts.offers.trees
        for sizer, tree, kept, tokens, cost in zip(sizers, offered, trees, expected, costs, strict=True):
            sizer.expected, sizer._cost = tokens, cost
            sizer._want(tree.size, kept.size, near)

    def _bill(self, drafters: Sequence[Experience]) -> tuple[list[float], int]:
        """What the guesses of each request cost, in tokens of plain decoding; and how many more nodes of each a hardly
        longer cycle has room for."""
        seconds, load, count = self.seconds, self.load, len(drafters)
        kept = [tree.size for tree in self.trees]
        drafting = sum([drafter.draft_seconds for drafter in drafters])
        learning = sum([drafter.learn_seconds for drafter in drafters])
        fixed = drafting + self.per_request * count
        roots, num_guesses = load.positions + count, sum(kept) - count
        plain, whole = seconds[roots - 1], seconds[roots + num_guesses - 1] + self.per_node * num_guesses
        is_cheap = drafting + learning < MIN_DRAFT_COST * plain
        per_guess = (whole - plain) / max(num_guesses, 1)
        per_token = (plain + self.per_request * count) / (load.tokens + count)  # of plain decoding
        around = [0.0 if is_cheap else drafter.draft_seconds + drafter.learn_seconds for drafter in drafters]
        costs = [(own + per_guess * (size - 1)) / per_token for own, size in zip(around, kept, strict=True)]
        return costs, _count_near(seconds, roots + num_guesses, fixed) // count


def cut_drafted(drafts: Drafts, context: int, load: Load, ready: tuple[int, ...] = ()) -> CutDrafts:
    """Cuts the trees of a batch, without drawn children, to the parts that pay.

    ``context``: committed positions of a request, in the mean. ``load``: of requests that are not among these.
    ``ready``: sizes of passes that can run at once, as in ``Target.ready_sizes``.
    """
    sizers, offers = drafts.sizers, drafts.offers
    costs, num_offered = sizers[0]._costs, sum([tree.size for tree in offers.trees])
    seconds, host = costs.seconds(load.positions + num_offered + SEEN, context, ready), costs.host
    fixed = sum([sizer._drafter.draft_seconds + host.per_request for sizer in sizers])
    pass_costs = PassCosts(seconds, load.positions, load.tokens, fixed, host.per_node)
    cut = cut_trees([sizer._guesses for sizer in sizers], offers, pass_costs)
    return CutDrafts(drafts, cut, load, seconds, host.per_request, host.per_node)


def _count_near(seconds: array[float], positions: int, fixed: float) -> int:
    """How many more positions a pass has room for if its cycle may take somewhat longer: passes have steps, so that a
    few more nodes may not pay where many would."""
    longest = NEAR * (seconds[positions - 1] + fixed) - fixed
    return bisect(seconds, longest, positions, min(positions + SEEN, len(seconds))) - positions


def note_silence(silent: Sequence[Sizer], others: Sequence[Sizer]) -> None:
    """Some requests of a batch had no guess to offer. Where that is true of all requests of a drafter, its
    ``min_chance`` may be the reason."""
    for drafter in {sizer._drafter for sizer in silent} - {sizer._drafter for sizer in others}:
        drafter.note_edge(1.0, 0.0)


def note_outcomes(
    sizers: Sequence[Sizer],
    offered: Sequence[DraftTree],
    verified: Sequence[DraftTree],
    emitted: Sequence[Sequence[int]],
) -> None:
    """Counts one cycle of many requests: the offered trees, the parts that were verified, and the emitted tokens."""
    compiled, trees, tokens = list[CompiledGuesses](), list[DraftTree](), list[Sequence[int]]()
    for sizer, tree, part, text in zip(sizers, offered, verified, emitted, strict=True):
        cost, sizer._cost = sizer._cost, None
        sizer._watch.note(len(text) - 1 if part.size > 1 else 0, cost)
        if tree.size == 1:
            continue
        guesses = sizer._guesses
        if tree.proposals:
            sizer._note_places(tree, part.size, text)
        elif isinstance(guesses, CompiledGuesses):
            compiled.append(guesses)
            trees.append(tree)
            tokens.append(text)
        else:
            guesses.note(tree, text)
    if compiled:
        note_all(compiled[0].core, compiled, trees, tokens)


def _note_drafts(drafts: Drafts) -> None:
    """Of a batch: once for each drafter, in the mean. The first draft of a request does not count: a draft model reads
    the prompt."""
    sizers, _, seconds, learning, were_ready = drafts
    known: dict[Experience, list[int]] = {}  # indices of requests
    for index, (sizer, was_ready) in enumerate(zip(sizers, were_ready, strict=True)):
        if sizer._has_drafted and was_ready:
            known.setdefault(sizer._drafter, []).append(index)
        sizer._has_drafted = True
    for drafter, own in known.items():
        count = len(own)
        drafter.note_draft(sum([seconds[i] for i in own]) / count, sum([learning[i] for i in own]) / count)


def _follow(mean: float, seconds: float) -> float:
    """A running mean, in which single slow readings count little."""
    if not mean:
        return seconds
    return mean + (1.0 - DRAFT_DECAY) * (min(seconds, MAX_OUTLIER * mean) - mean)


def _place_kind(place: int) -> Kind:
    return DRAWN, place, 0, False
