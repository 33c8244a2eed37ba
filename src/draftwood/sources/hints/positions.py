"""Hints from the rejected branches of the last trees: what the target predicted there for the same position.

A rejected branch is often wrong in one token only: if the tree had *a man* and the text goes on with *the*, then *man*
is still a good guess for the token after it, though no table has a row for *the* in this context.
"""

from bisect import bisect
from collections.abc import Sequence

from draftwood.compiled import CompiledPositions, CompiledSource, Harvest, Hints, load_core

SHARES = (0.01, 0.02, 0.04, 0.07, 0.12, 0.2, 0.3, 0.45, 0.6, 0.8)  # bucket edges
MIDDLES = (0.005, 0.015, 0.03, 0.05, 0.09, 0.15, 0.25, 0.37, 0.52, 0.7, 0.9)  # of the buckets
NUM_SHARES = len(SHARES) + 1
NUM_LEVELS, LEVEL_WIDTH, MAX_LEVEL_TOKENS = 8, 12, 256
MIN_SCORE = 0.01  # of a prediction that counts

Level = tuple[list[int], list[float]]  # tokens and their shares, likeliest first


class PositionHints:
    """What the rejected nodes of the last trees predicted for the next positions, weighted by their chances.

    Kinds: of absent tokens after the text and after drafted tokens; of the others by that and by their share of the
    predictions for the position.
    """

    name = "position"
    priors: Sequence[float] = (0.03, 0.03, *(0.4 * middle for middle in MIDDLES * 2))

    def __init__(self) -> None:
        core = load_core()
        self._levels: PythonPositions | CompiledPositions = (
            PythonPositions() if core is None else CompiledPositions(core)
        )

    def extend(self, tokens: Sequence[int]) -> None:
        """The tree says how many tokens there are."""

    def learn(self, seen: Harvest) -> None:
        self._levels.note(seen)

    def look(self, _tail: Sequence[int], depth: int) -> Hints | None:
        assert isinstance(self._levels, PythonPositions)
        tokens, shares = self._levels.find(depth)
        if not tokens:
            return None
        first = 2 + (depth > 0) * NUM_SHARES
        return Hints(tokens, [first + bisect(SHARES, share) for share in shares], int(depth > 0))

    def compiled(self) -> CompiledSource | None:
        levels = self._levels
        if not isinstance(levels, CompiledPositions):
            return None
        return CompiledSource("look_positions", levels.address, "follow_positions")


class PythonPositions:
    """Predictions by depth below the root, where there is no compiler."""

    def __init__(self) -> None:
        self._levels: list[Level] = [([], [])] * NUM_LEVELS

    def find(self, depth: int) -> Level:
        return self._levels[depth] if depth < NUM_LEVELS else ([], [])

    def note(self, seen: Harvest) -> None:
        """Predictions of earlier trees stay where this one has none."""
        values = seen.tree.values()
        rejected = set(range(len(values))) - set(seen.path)
        before = [*self._levels, *[([], [])] * seen.num_emitted]
        for level in range(NUM_LEVELS):
            depth = level + seen.num_emitted
            nodes = [node for node in sorted(rejected) if seen.tree.depths[node] == depth]
            found = self._sum([(values[node], node) for node in nodes], seen)
            self._levels[level] = found if found[0] else before[depth]

    @staticmethod
    def _sum(nodes: Sequence[tuple[float, int]], seen: Harvest) -> Level:
        sums: dict[int, float] = {}
        total = 0.0
        for value, node in nodes:
            total += value
            for token, score in zip(seen.ids[node].tolist(), seen.scores[node].tolist(), strict=True):
                if score <= MIN_SCORE:
                    break
                if token in sums or len(sums) < MAX_LEVEL_TOKENS:
                    sums[token] = sums.get(token, 0.0) + value * score
        best = sorted(sums, key=lambda token: -sums[token])[:LEVEL_WIDTH]
        return best, [sums[token] / total for token in best]
