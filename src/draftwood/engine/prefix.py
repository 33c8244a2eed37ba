"""Finished sequences whose cache may be reused: prompts with the same beginning, and the next turn of a chat."""

from dataclasses import dataclass, replace
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from draftwood.targets import Target

MIN_SHARED = 8  # tokens; below this prefill costs nothing
MAX_SHARE = 4  # at most a quarter of the cache is kept: slots that were never used take no memory

Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False, slots=True)  # compared by identity
class KeptPrefix:
    tokens: Tokens  # committed
    sequence: int
    owner: str


class PrefixStore:
    """The latest finished sequences, kept until their slots are needed. The last used ones are kept longest."""

    # Of all engines on a target. It may outlive some of them, and then still holds their sequences.
    _all: ClassVar[WeakKeyDictionary[Target, list[list[KeptPrefix]]]] = WeakKeyDictionary()

    def __init__(self, target: Target) -> None:
        self._target = target
        self._kept: list[KeptPrefix] = []  # last used ones last
        self._all.setdefault(target, []).append(self._kept)

    def put(self, tokens: Tokens, sequence: int, owner: str = "") -> None:
        """Keep a sequence; drop those that it begins with."""
        for kept in [kept for kept in self._kept if kept.owner == owner]:
            if common_prefix(kept.tokens, tokens) == len(kept.tokens):
                self._drop(kept)
        self._kept.append(KeptPrefix(tokens, sequence, owner))
        while (
            len(self._kept) > 1 and sum(len(kept.tokens) for kept in self._kept) > self._target.num_slots // MAX_SHARE
        ):
            self._drop(self._kept[0])

    def find(self, prompt: Tokens, owner: str) -> tuple[KeptPrefix | None, int]:
        """The kept sequence with the longest beginning of the prompt, and how long that is.

        Only prefixes of the same owner count: the number of reused tokens would tell one client what another wrote.
        """
        lengths = [(common_prefix(kept.tokens, prompt), kept) for kept in self._kept if kept.owner == owner]
        length, best = max(lengths, key=lambda found: found[0], default=(0, None))
        return (best, length) if length >= MIN_SHARED else (None, 0)

    def open(self, kept: KeptPrefix, length: int, capacity: int, *, copies: bool) -> int | None:
        """Open a sequence of that capacity with the first ``length`` tokens of a kept one. None if it does not fit.

        A sequence that has nothing else is taken over. Of others a copy is made if ``copies`` and there is room for it.
        """
        self._kept.remove(kept)
        if copies and length < len(kept.tokens) and self.make_room(capacity):
            sequence = self._target.fork(kept.sequence, capacity, length)
            self._kept.append(kept)
            return sequence
        self._target.truncate(kept.sequence, length)
        while not self._target.resize(kept.sequence, capacity):
            if not self.drop_oldest():
                self._kept.append(replace(kept, tokens=kept.tokens[:length]))
                return None
        return kept.sequence

    def make_room(self, capacity: int) -> bool:
        """Drop the oldest until a sequence of that capacity can be opened; False if that is not enough."""
        while not self._target.can_open(capacity):
            if not self.drop_oldest():
                return False
        return True

    def drop_oldest(self) -> bool:
        """Of its own, then of other engines on the target. False: there is none left."""
        kept = next((kept for kept in (self._kept, *self._all[self._target]) if kept), None)
        if kept is None:
            return False
        self._target.close(kept.pop(0).sequence)
        return True

    def clear(self) -> None:
        while self._kept:
            self._drop(self._kept[0])

    def _drop(self, kept: KeptPrefix) -> None:
        self._kept.remove(kept)
        self._target.close(kept.sequence)


def common_prefix(a: Tokens, b: Tokens) -> int:
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(differs.argmax()) if differs.any() else size
