"""What requests share: an index of the latest tokens of all answers, and of a datastore."""

from collections.abc import Sequence

from draftwood.sources import PlaceHints

END = -1  # after each piece of text
BLOCK = 64  # tokens of a running answer that are added together
OVERLAP = 8  # tokens before a block that are added with it: the longest run that is indexed


class Memory(PlaceHints):
    """A bounded index; beyond its limit the older half is dropped."""

    name = "memory"

    def __init__(self, max_tokens: int) -> None:
        super().__init__()
        self._max_tokens = max_tokens

    def add(self, tokens: Sequence[int]) -> None:
        """Add a piece of text, with up to ``OVERLAP`` tokens that precede it."""
        room = max(self._max_tokens - 1, 1)
        piece = [*tokens[-room:], END]
        if len(self.index) + len(piece) > self._max_tokens:
            keep = min(self._max_tokens // 2, self._max_tokens - len(piece))
            self.index.forget(len(self.index) - max(keep, 0))
        self.extend(piece)
