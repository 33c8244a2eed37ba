"""Hints from a draft model, for the nodes that it was run over in this cycle."""

from bisect import bisect
from collections.abc import Sequence

from draftwood.compiled import TAIL, CompiledDrafted, CompiledSource, Harvest, Hints, load_core
from draftwood.sources.hints.successors import MIDDLES, NUM_PROBS, PROBS
from draftwood.sources.rowtable import IdRows, ScoreRows
from draftwood.targets import Found

NUM_DRAFT_DEPTHS = 3
MAX_DRAFTED, DRAFTED_WIDTH = 160, 16  # nodes, and predictions of each


class DraftedHints:
    """What a draft model predicted after a node.

    Kinds: of absent tokens by depth; of the others by depth and probability.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        core = load_core()
        self._rows: PythonDrafted | CompiledDrafted = PythonDrafted() if core is None else CompiledDrafted(core)
        self.priors: Sequence[float] = [0.006, 0.01, 0.015, *(0.85 * prob for prob in MIDDLES * NUM_DRAFT_DEPTHS)]

    def clear(self) -> None:
        """Forget the predictions of the last cycle."""
        self._rows.clear()

    def add(self, tail: Sequence[int], ids: IdRows, scores: ScoreRows) -> None:
        """Predictions [K], best first, after a text that ends with ``tail``."""
        self._rows.add(tail, ids, scores)

    def add_found(self, tail: Sequence[int], found: Found) -> None:
        """Those after all nodes of a search below a text that ends with ``tail``."""
        self._rows.add_found(tail, found)

    def extend(self, tokens: Sequence[int]) -> None:
        """The draft model reads the text."""

    def learn(self, seen: Harvest) -> None:
        """As above."""

    def look(self, tail: Sequence[int], depth: int) -> Hints | None:
        assert isinstance(self._rows, PythonDrafted)
        row = self._rows.find(tail)
        if row is None:
            return None
        by_depth = 0 if depth < 1 else 1 if depth < 3 else 2
        first = NUM_DRAFT_DEPTHS + by_depth * NUM_PROBS
        return Hints(row[0], [first + bisect(PROBS, score) for score in row[1]], by_depth)

    def compiled(self) -> CompiledSource | None:
        rows = self._rows
        return CompiledSource("look_drafted", rows.address) if isinstance(rows, CompiledDrafted) else None


class PythonDrafted:
    """The predictions where there is no compiler."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    def clear(self) -> None:
        self._rows.clear()

    def add(self, tail: Sequence[int], ids: IdRows, scores: ScoreRows) -> None:
        if len(self._rows) < MAX_DRAFTED:
            known = int((scores[:DRAFTED_WIDTH] > 0.0).sum())
            self._rows.setdefault(tuple(tail[-TAIL:]), (ids[:known].tolist(), scores[:known].tolist()))

    def add_found(self, tail: Sequence[int], found: Found) -> None:
        ids, scores = (part.reshape(-1, found.best) for part in (found.tokens, found.probs))
        tails = {0: list(tail)}
        for node, pick in enumerate(found.picks.tolist()):
            if pick >= 0:
                tails[node] = [*tails[pick // found.best], int(ids[pick // found.best, pick % found.best])]
        for node, own in tails.items():
            self.add(own, ids[node], scores[node])

    def find(self, tail: Sequence[int]) -> tuple[list[int], list[float]] | None:
        found = self._rows.get(tuple(tail[-TAIL:]))
        return found if found is not None and found[0] else None
