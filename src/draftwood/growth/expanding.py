"""A blend that a draft model takes part in: it is run over the likeliest nodes, level by level, while that pays.

The tree is grown again after each draft pass, since the predictions change which nodes are likely. What a pass gained
is known at once: the chances of the nodes that the tree would not have had without it. A node that was in the tree
anyway counts for nothing, even if the pass made it likelier. The next pass is made if it promises more than the same
time gains elsewhere.

Whether the chances of these nodes come true differs from text to text, so each request learns how far to trust them.

Where trees are cut to the nodes that pay, only these count: a node's gain is its chance less that of the nodes which
are cut off, since it takes as long to verify as one of them.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from draftwood.growth.blend import Blend, BlendLimits
from draftwood.growth.drawn import Ids, Probs
from draftwood.growth.neural import Frontier
from draftwood.growth.readings import MAX_LONGER, MeanTime
from draftwood.growth.trust import Trust
from draftwood.targets import Found
from draftwood.tree import DraftTree

WIDTH = 10  # predictions per node
BATCH = 10  # nodes per pass
MAX_PASSES = 12
MIN_GAIN = 0.02  # tokens for which a pass is made where time does not matter
FIRST_SHARE = 0.5  # prior: gained tokens over the chance that a path ends, so far, at a node that the pass runs over
MAX_SHARE, MIN_CHANCES = 2.0, 0.01
SMOOTHING = 0.1
RECOVERY = 0.02  # of the way back to the prior per cycle without the pass, so that it is tried again
# Of the rest of a cycle that the first pass may take in the default, with what it leaves behind. Where both models run
# from the caches, that is about as much again, and small targets gain nothing.
MAX_PART = 0.25
ENOUGH_PASSES = 24  # measured until a draft model is left out
MAX_AFTERMATH = 2.0  # times the first pass
CYCLE_DECAY, COMPUTE_EVERY = 0.998, 16  # cycles; more than causes
FADED = 0.25  # weight of cycles before those that are looked at again
PER_CONTEXT = 1000.0  # tokens
DOUBT = (1e-6, 1e-6, 1e-6, 2.0)  # cycles without any effect, by cause
SLOWLY = 0.02  # how these follow: a verdict holds for many requests, and cycles differ by task
LOOK_AGAIN = 16  # of so many requests one has it nevertheless, so that its passes are measured again

Path = tuple[int, ...]  # tokens below the root


class CycleShape(NamedTuple):
    """What the time of the rest of a cycle follows from."""

    positions: int  # that were verified
    context: int  # tokens before them
    has_passes: bool  # of the draft model


class Aftermath:
    """How much longer the rest of a cycle takes after draft passes, which leave less of the target in the caches: by
    least squares over recent cycles, beside what positions and the context cost. Each cycle is compared with the one
    before: other processes slow the machine down for longer than that, and fewer passes are made where it is quick. As
    far as the result is certain: the standard error is taken off."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._products = np.zeros((4, 4))  # of causes with each other
        self._sums = np.zeros(4)  # of causes times seconds
        self._squares = self._weight = 0.0  # of seconds; of all cycles
        # Causes and seconds of cycles that are not in these sums yet, the last one of those that are before them: after
        # a pass of the target each step of NumPy takes ten times as long as it does by itself.
        self._new: list[tuple[float, ...]] = []

    def note(self, shape: CycleShape, seconds: float) -> None:
        positions, context, has_passes = shape
        longer = context / PER_CONTEXT
        self._new.append((positions, longer, positions * longer, has_passes, seconds))
        if len(self._new) > COMPUTE_EVERY:
            self._add_new()
            self.seconds = self._estimate()

    def part(self) -> None:
        """The next cycle does not follow on the last one."""
        if self._new:
            self._add_new()
            self._new.clear()

    def fade(self) -> None:
        """The cycles so far were long ago. They weigh little, so the next estimate waits for new ones."""
        self.part()
        self._products *= FADED
        self._sums *= FADED
        self._squares, self._weight = FADED * self._squares, FADED * self._weight

    def _add_new(self) -> None:
        if len(self._new) < 2:
            return
        rows = np.diff(np.array(self._new), axis=0)  # [n, causes and seconds]
        faded = CYCLE_DECAY ** np.arange(len(rows) - 1, -1, -1)
        products, before = (rows.T * faded) @ rows, CYCLE_DECAY ** len(rows)
        self._products = before * self._products + products[:-1, :-1]
        self._sums = before * self._sums + products[:-1, -1]
        self._squares = before * self._squares + products[-1, -1]
        self._weight = before * self._weight + float(faded.sum())
        del self._new[:-1]

    def _estimate(self) -> float:
        inverse = np.linalg.inv(self._products + np.diag(DOUBT))
        effects = inverse @ self._sums
        rest = self._squares - 2.0 * effects @ self._sums + effects @ self._products @ effects
        variance = max(float(rest), 0.0) / (self._weight - len(effects))
        return max(float(effects[-1] - math.sqrt(variance * inverse[-1, -1])), 0.0)


class PassRecord:
    """What draft passes gained and took so far, by their number in the cycle; requests share it."""

    def __init__(self) -> None:
        self._shares = [FIRST_SHARE] * MAX_PASSES
        self._seconds = [MeanTime() for _ in range(MAX_PASSES)]
        self._cycle = MeanTime()  # the rest of a cycle
        self._first_alone, self._cycle_alone = MeanTime(SLOWLY), MeanTime(SLOWLY)  # of single requests
        self._aftermath = Aftermath()
        self._was_too_slow = False  # by the last measurement
        self._num_without = 0  # requests
        self.floor = 0.0  # chance of nodes that are not worth their place, about
        self.num_passes = self.num_cycles = 0

    def note_request(self) -> None:
        """One begins: its first cycle does not follow on the last one."""
        self._aftermath.part()

    def note_pass(self, number: int, chances: float, gained: float, seconds: float, num_requests: int = 1) -> None:
        """Of one of the requests that share the pass."""
        self._shares[number] += SMOOTHING * (min(gained / chances, MAX_SHARE) - self._shares[number])
        self._seconds[number].note(seconds, 1.0 / num_requests)
        if num_requests == 1 and number == 0 and self.num_passes:  # the very first one reads the weights
            self._first_alone.note(seconds)
        self.num_passes += 1

    def note_cycle(self, seconds: float, num_requests: int = 1, shape: CycleShape | None = None) -> None:
        """The rest of a cycle, after its draft passes."""
        if num_requests == 1:
            self._cycle_alone.note(seconds)
            if shape is not None and self._cycle.weight:  # the very first one reads the weights
                self._aftermath.note(shape, min(seconds, MAX_LONGER * self._cycle.seconds))
        else:
            self._aftermath.part()
        self._cycle.note(seconds, 1.0 / num_requests)
        self.num_cycles += 1

    def note_kept(self, values: Sequence[float], num_kept: int) -> None:
        """``values``: of the nodes of a tree, likeliest first; ``num_kept``: how many were verified."""
        seen = values[num_kept] if num_kept < len(values) else min(self.floor, values[-1])
        self.floor += SMOOTHING * (seen - self.floor)

    @property
    def is_too_slow(self) -> bool:
        """Whether requests do better without the draft model, whose passes take too long here: they were measured with
        single requests."""
        taken = self._first_alone.seconds + self._left_behind
        return self._is_measured and taken > MAX_PART * self._cycle_alone.seconds

    @property
    def _left_behind(self) -> float:
        """Seconds that passes make the rest of their cycle longer."""
        return min(self._aftermath.seconds, MAX_AFTERMATH * self._first_alone.seconds)

    @property
    def _is_measured(self) -> bool:
        return self._first_alone.weight >= ENOUGH_PASSES

    def is_left_out(self) -> bool:
        """Whether the next request begins without a draft model that is too slow. Now and then one begins with it, and
        its passes are measured again."""
        if self._is_measured:
            self._was_too_slow = self.is_too_slow
        if not self._was_too_slow:
            return False
        self._num_without = (self._num_without + 1) % LOOK_AGAIN
        if self._num_without == 0 and self._is_measured:
            self._first_alone, self._cycle_alone = MeanTime(SLOWLY), MeanTime(SLOWLY)
            self._aftermath.fade()
        return self._num_without > 0

    def is_worth(
        self, number: int, chances: float, expected: float, spent: float, *, is_timed: bool, trust: float = 1.0
    ) -> bool:
        """Whether to make pass ``number`` over nodes at which the path ends with ``chances``, if the tree without it
        promises ``expected`` tokens after ``spent`` seconds of drafting. ``trust``: of the request, in what passes
        promise."""
        if number >= MAX_PASSES:
            return False
        gain = self._shares[number] * chances
        needed = MIN_GAIN
        if is_timed and self._cycle.weight:
            taken = self._seconds[number].seconds + (0.0 if number else self._left_behind)
            needed = max(needed, expected * taken / (self._cycle.seconds + spent))
        if trust * gain >= needed:
            return True
        if gain < needed:  # whatever the request thinks of it
            self._shares[number] += RECOVERY * (FIRST_SHARE - self._shares[number])
        return False


class ExpandingBlend:
    """One growing tree; the interface is that of ``growth.neural``."""

    width = WIDTH
    search = None  # which nodes come next depends on all sources

    def __init__(
        self,
        blend: Blend,
        tail: Sequence[int],
        limits: BlendLimits,
        add: Callable[[Sequence[int], Ids, Probs], None],
        record: PassRecord | None,
        *,
        max_depth: int | None,
        is_timed: bool,
        trust: Trust | None = None,
        num_requests: int = 1,
    ) -> None:
        """``tail``: the last tokens of the text. ``add`` takes the predictions [K] after a text.
        ``record``: None if no pass can be made. ``max_depth``: deepest level that the draft model can predict.
        ``trust``: of this request. ``num_requests``: that share the passes."""
        self._blend, self._tail, self._limits, self._add = blend, list(tail), limits, add
        self._record, self._max_depth, self._is_timed = record, max_depth, is_timed
        self._trust = trust or Trust()
        self._num_requests = num_requests
        self._expanded: dict[Path, int] = {}  # numbers of the nodes that were run
        self._known_paths: list[Path] | None = None
        self._num_passes, self._seconds = 0, 0.0
        self._floor = 0.0 if record is None else record.floor
        self._tree = self._grow_tree()
        self._without: dict[Path, float] = {}  # what the tree had before the first pass
        self._next, self._chances = self._select()

    def frontier(self) -> Frontier | None:
        if not self._next:
            return None
        self._started = time.perf_counter()
        return Frontier(
            [path[-1] if path else self._tail[-1] for path in self._next],
            [self._expanded[path[:-1]] if path else -1 for path in self._next],
        )

    def grow(self, token_ids: Ids, probs: Probs) -> None:
        for path, ids, row in zip(self._next, token_ids, probs, strict=True):
            self._expanded[path] = len(self._expanded)
            self._add([*self._tail, *path], ids, row)
        number, chances, before = self._num_passes, self._chances, self._find_kept()
        self._without = self._without or before
        self._num_passes += 1
        self._tree = self._grow_tree()
        taken = time.perf_counter() - self._started
        self._seconds += taken
        assert self._record is not None
        gained = sum(value - self._floor for path, value in self._find_kept().items() if path not in before)
        self._record.note_pass(number, chances, gained, taken, self._num_requests)
        self._next, self._chances = self._select()

    def note(self, num_kept: int, emitted: Sequence[int]) -> None:
        """The tree was cut to ``num_kept`` nodes, the likeliest, and verified: whether those of them that passes added
        were as often right as they promised."""
        if not self._num_passes:
            return
        verified = zip(self._paths[:num_kept], self.values, strict=False)
        added = {path: value for path, value in verified if path not in self._without}
        if added:
            right = sum(tuple(emitted[:length]) in added for length in range(1, len(emitted)))
            self._trust.note(sum(added.values()), right)

    @property
    def has_passes(self) -> bool:
        """Whether the draft model ran for it."""
        return self._num_passes > 0

    def take(self, found: Found) -> None:
        """Only growths with a ``search`` are given what one found."""
        raise AssertionError("a search was run that this growth did not ask for")

    def tree(self) -> DraftTree:
        return self._tree

    @property
    def expansion_of(self) -> list[int]:
        if not self._num_passes:
            return [-1] * len(self.values)
        return [self._expanded.get(path, -1) for path in self._paths]

    @property
    def _paths(self) -> list[Path]:
        """Of the nodes of the tree. Most cycles make no pass and need none."""
        if self._known_paths is None:
            self._known_paths = self._tree.paths()
        return self._known_paths

    def _find_kept(self) -> dict[Path, float]:
        """The chances of the nodes that are worth their place."""
        nodes = zip(self._paths, self.values, strict=True)
        return {path: value for path, value in nodes if value >= self._floor}

    def _grow_tree(self) -> DraftTree:
        tree = self._blend.tree(self._tail, self._limits)
        self.values, self._known_paths = tree.values(), None
        self._expected = sum([value for value in self.values if value >= self._floor])
        return tree

    def _select(self) -> tuple[list[Path], float]:
        """The nodes of the next pass, and the chance that the path ends at one of them; none if it does not pay."""
        if self._record is None or self._limits.budget == 1:
            return [], 0.0
        # A child is not likelier than its parent, so the last nodes of a full tree cannot have any.
        floor = max(self.values[-1], self._floor) if len(self.values) == self._limits.budget else self._floor
        found = [0]  # the first pass runs over the root
        if self._num_passes:
            found = [
                node
                for node, (value, path) in enumerate(zip(self.values, self._paths, strict=True))
                if value > floor and path not in self._expanded and self._can_run(path)
            ][:BATCH]  # likeliest first, as the tree is
        ends = list(self.values)
        for node, parent in enumerate(self._tree.parents[1:], start=1):
            ends[parent] -= self.values[node]
        chances = max(sum([ends[node] for node in found]), MIN_CHANCES)
        pays = self._record.is_worth(
            self._num_passes,
            chances,
            self._expected,
            self._seconds,
            is_timed=self._is_timed,
            trust=self._trust.share if self._is_timed else 1.0,
        )
        if not (pays or self._num_passes):
            self._trust.recover()
        return ([self._paths[node] for node in found], chances) if found and pays else ([], 0.0)

    def _can_run(self, path: Path) -> bool:
        """The draft model runs over a node after its parent."""
        if self._max_depth is not None and len(path) >= self._max_depth:
            return False
        return not path or path[:-1] in self._expanded
