"""Hints from matches in the text."""

from bisect import bisect
from collections.abc import Iterable, Sequence

from draftwood.compiled import TAIL, CompiledPlaces, CompiledSource, Harvest, Hints, load_core

LENGTHS = (2, 3, 4, 5, 6, 8, 11, 16, 24)  # bucket edges of matched tokens
ORDERS = (8, 4, 2)  # lengths of the runs that are indexed, longest first
MAX_PLACES = 6  # latest places after a run that are looked at
NUM_LENGTHS = len(LENGTHS) + 1
FIRST_RATES = tuple(1.0 - 1.0 / (0.6 * length + 1.2) for length in (1, *LENGTHS) for _ in range(3))
PRIORS = (*[0.02] * NUM_LENGTHS, *FIRST_RATES, *(0.25 * rate for rate in FIRST_RATES))


class PlaceHints:
    """What followed the last two or more tokens where they occurred before in the text, at several places.

    Runs of several lengths are indexed: the latest places after a short run may all differ from the text further back.

    Kinds: of absent tokens by the longest match; of the others by whether they follow the latest of the longest
    matches, by the longest match that they follow, and by the number of places that they follow (1, 2, 3 or more).
    """

    name = "context"
    priors: Sequence[float] = PRIORS

    def __init__(self) -> None:
        core = load_core()
        self.index: PythonPlaces | CompiledPlaces = PythonPlaces() if core is None else CompiledPlaces(core)

    def extend(self, tokens: Sequence[int]) -> None:
        self.index.extend(tokens)

    def learn(self, seen: Harvest) -> None:
        """Rows of logits do not matter."""

    def look(self, tail: Sequence[int], _depth: int) -> Hints | None:
        assert isinstance(self.index, PythonPlaces)
        found = self.index.find(tail)
        if not found:
            return None
        longest = max(length for _, length in found)
        first = next(token for token, length in found if length == longest)
        matched: dict[int, int] = {}
        votes: dict[int, int] = {}
        for token, length in found:
            matched[token] = max(matched.get(token, 0), length)
            votes[token] = votes.get(token, 0) + 1
        kinds = [place_kind(token == first, matched[token], votes[token]) for token in matched]
        return Hints(list(matched), kinds, bisect(LENGTHS, longest))

    def compiled(self) -> CompiledSource | None:
        index = self.index
        if not isinstance(index, CompiledPlaces):
            return None
        return CompiledSource("look_places", index.address, "follow_places", index.reserve)


def place_kind(is_first: bool, length: int, votes: int) -> int:
    return NUM_LENGTHS + ((not is_first) * NUM_LENGTHS + bisect(LENGTHS, length)) * 3 + min(votes, 3) - 1


class PythonPlaces:
    """The index where there is no compiler."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        # By order: the place before each one after the same run, -1 if none; the latest place after each run.
        self._before: list[list[int]] = [[] for _ in ORDERS]
        self._latest: list[dict[tuple[int, ...], int]] = [{} for _ in ORDERS]

    def extend(self, tokens: Iterable[int]) -> None:
        text = self._tokens
        for token in tokens:
            # A place is indexed once its token is known, so the last tokens never match themselves.
            place = len(text)
            for size, before, latest in zip(ORDERS, self._before, self._latest, strict=True):
                run = tuple(text[place - size :]) if place >= size else None
                before.append(-1 if run is None else latest.get(run, -1))
                if run is not None:
                    latest[run] = place
            text.append(token)

    def __len__(self) -> int:
        return len(self._tokens)

    def last(self, count: int) -> list[int]:
        return self._tokens[len(self) - count :]

    def forget(self, count: int) -> None:
        """Drop the first ``count`` tokens."""
        kept = self._tokens[count:]
        self._tokens = []
        self._before, self._latest = [[] for _ in ORDERS], [{} for _ in ORDERS]
        self.extend(kept)

    def find(self, tail: Sequence[int]) -> list[tuple[int, int]]:
        """Tokens after earlier occurrences, latest first for each order, and how many tokens before each match."""
        text = self._tokens
        found: list[tuple[int, int]] = []
        tail = list(tail[-TAIL:])
        known = TAIL + 1  # longer matches were found after a longer run
        for size, before, latest in zip(ORDERS, self._before, self._latest, strict=True):
            if len(tail) < size:
                continue
            place = latest.get(tuple(tail[-size:]), -1)
            for _ in range(MAX_PLACES):
                if place < 0:
                    break
                matched, most = size, min(len(tail), place)
                while matched < most and tail[-1 - matched] == text[place - 1 - matched]:
                    matched += 1
                if matched < known and text[place] >= 0:  # not the end of a text
                    found.append((text[place], matched))
                place = before[place]
            known = size
        return found
