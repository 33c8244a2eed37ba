"""Hints from a datastore: what followed the same tokens in a corpus."""

from bisect import bisect
from collections import Counter
from collections.abc import Sequence

from draftwood.compiled import CompiledSource, CompiledStore, Harvest, Hints, load_core
from draftwood.sources.datastore import Datastore

LENGTHS = (3, 4, 6, 9, 13)  # bucket edges of matched tokens
SHARES = (0.03, 0.07, 0.15, 0.3, 0.5, 0.7, 0.85, 0.99)  # bucket edges of the share of places
MIN_MATCH, MAX_MATCH = 2, 16  # tokens
MAX_PLACES = 64  # occurrences that are looked at, spread evenly over all
NUM_LENGTHS, NUM_SHARES = len(LENGTHS) + 1, len(SHARES) + 1
_MIDDLES = [(low + high) / 2 for low, high in zip((0.0, *SHARES), (*SHARES, 1.0), strict=True)]


class DatastoreHints:
    """What followed the longest run of the last tokens that occurs in a datastore.

    Kinds: of absent tokens by the length of the match; of the others by that and by the share of the places that they
    follow.
    """

    name = "datastore"

    def __init__(self, store: Datastore) -> None:
        self._store = store
        core = load_core()
        self._compiled = None if core is None else CompiledStore(store.tokens, store.suffixes, store.info.vocab_size)
        sure = [0.5, 0.6, 0.7, 0.8, 0.85, 0.9]  # by length
        self.priors: Sequence[float] = [*[0.03] * NUM_LENGTHS, *(trust * share for trust in sure for share in _MIDDLES)]

    def extend(self, tokens: Sequence[int]) -> None:
        """The corpus stays as it is."""

    def learn(self, seen: Harvest) -> None:
        """As above."""

    def look(self, tail: Sequence[int], _depth: int) -> Hints | None:
        match = self._store.matches(tail, MAX_MATCH, MIN_MATCH)
        if match is None:
            return None
        rows = self._store.continuations(match, 1, MAX_PLACES)[:, 0].tolist()
        votes = Counter([token for token in rows if token >= 0])
        by_length = bisect(LENGTHS, match.length)
        first = NUM_LENGTHS + by_length * NUM_SHARES
        return Hints(list(votes), [first + bisect(SHARES, count / len(rows)) for count in votes.values()], by_length)

    def compiled(self) -> CompiledSource | None:
        return None if self._compiled is None else CompiledSource("look_store", self._compiled.address)
