"""Finished sequences whose cache may be reused: the next turn of a chat begins with the last one."""

from collections.abc import Sequence
from typing import NamedTuple

from draftwood.targets import Target

MIN_SHARED = 8  # tokens; below this prefill costs nothing


class _Kept(NamedTuple):
    tokens: tuple[int, ...]  # committed
    sequence: int
    owner: str


class PrefixStore:
    """The latest finished sequences, kept until their slots are needed."""

    def __init__(self, target: Target, limit: int) -> None:
        self._target = target
        self._limit = limit
        self._kept: list[_Kept] = []  # oldest first

    def put(self, tokens: Sequence[int], sequence: int, owner: str = "") -> None:
        self._kept.append(_Kept(tuple(tokens), sequence, owner))
        while len(self._kept) > self._limit:
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        if self._kept:
            self._target.close(self._kept.pop(0).sequence)
            return True
        return False

    def clear(self) -> None:
        while self.drop_oldest():
            pass

    def take(self, prompt_ids: Sequence[int], capacity: int, owner: str = "") -> tuple[int, int] | None:
        """A sequence of that capacity which holds the longest known beginning of the prompt, and how much it holds.

        Only prefixes of the same owner count: the number of reused tokens would tell one client what another wrote.
        The last prompt token is never taken from the cache: it is the root of the first tree.
        """
        own = (kept for kept in self._kept if kept.owner == owner)
        best = max(own, key=lambda kept: common_prefix(kept.tokens, prompt_ids), default=None)
        shared = 0 if best is None else min(common_prefix(best.tokens, prompt_ids), len(prompt_ids) - 1)
        if best is None or shared < MIN_SHARED or not self._make_room(capacity, best):
            return None
        # The old extent is as large as its own request needed, so the prefix moves to one of the new size.
        self._target.truncate(best.sequence, shared)
        sequence = self._target.fork(best.sequence, capacity)
        self._kept.remove(best)
        self._target.close(best.sequence)
        return sequence, shared

    def _make_room(self, capacity: int, spared: _Kept) -> bool:
        """Drops the oldest prefixes but ``spared`` until a sequence of that capacity can be opened."""
        for kept in [kept for kept in self._kept if kept is not spared]:
            if self._target.can_open(capacity):
                break
            self._kept.remove(kept)
            self._target.close(kept.sequence)
        return self._target.can_open(capacity)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
