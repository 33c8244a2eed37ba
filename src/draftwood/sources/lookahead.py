"""Jacobi n-grams: a window of guesses that the target itself improves, and a pool for the n-grams it yields.

A window has columns. Column j guesses the tokens from place j behind the last token on; its first token is the oldest
guess. The first tokens of all columns form a chain, and the rest of a column hangs below its first token::

    root - a0 - b0 - c0           columns (a0 a1 a2), (b0 b1 b2), (c0 c1 c2)
            |    |    |
            a1   b1   c1          row 1 of column j sees the root, row 0 up to column j, and its own column above it
            |    |    |
            a2   b2   c2

That is a part of a draft tree, so a window is verified like any other guesses. What the target chooses behind the end
of a column completes an n-gram, and becomes the column's new last token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from draftwood.tree import DraftTree, TreeBuilder


class NgramPool:
    """N-grams by their first token, the latest first. Both the n-grams of one token and all together are bounded."""

    def __init__(self, per_token: int, limit: int) -> None:
        self._per_token = per_token
        self._limit = limit
        self._by_first: dict[int, OrderedDict[tuple[int, ...], None]] = {}  # oldest first
        self._all: OrderedDict[tuple[int, ...], None] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._all)

    def add(self, ngram: tuple[int, ...]) -> None:
        """Enters an n-gram, or makes a known one the latest again."""
        siblings = self._by_first.setdefault(ngram[0], OrderedDict())
        for order in (siblings, self._all):
            order[ngram] = None
            order.move_to_end(ngram)
        if len(siblings) > self._per_token:
            self._forget(next(iter(siblings)))
        if len(self._all) > self._limit:
            self._forget(next(iter(self._all)))

    def add_text(self, tokens: Sequence[int], size: int) -> None:
        """Enters the n-grams of that size in a text, the last ones if there are more than the pool holds."""
        for start in range(max(0, len(tokens) - size + 1 - self._limit), len(tokens) - size + 1):
            self.add(tuple(tokens[start : start + size]))

    def starting_with(self, token: int) -> list[tuple[int, ...]]:
        """The n-grams with this first token, the latest first."""
        return list(reversed(self._by_first.get(token, ())))

    def _forget(self, ngram: tuple[int, ...]) -> None:
        del self._all[ngram]
        siblings = self._by_first[ngram[0]]
        del siblings[ngram]
        if not siblings:
            del self._by_first[ngram[0]]


class JacobiWindow:
    """Columns of guesses, each up to ``depth`` tokens. It starts with one row and gains a row a cycle."""

    def __init__(self, first_row: Iterable[int], depth: int) -> None:
        self.columns: list[tuple[int, ...]] = [(token,) for token in first_row]
        self._depth = depth

    def __len__(self) -> int:
        """Nodes that the window takes in a tree, at most: equal guesses share one."""
        return sum(map(len, self.columns))

    def shrink(self, width: int, depth: int) -> None:
        """Gives up the columns and the oldest guesses that are too many, for good."""
        self._depth = min(depth, self._depth)
        self.columns = [column[-self._depth :] for column in self.columns[:width]]

    def place(self, builder: TreeBuilder, source: str, prob: float) -> None:
        """Adds the window to a tree, column by column, so that a tree cut short still has whole columns."""
        first = 0
        for column in self.columns:
            node = first = builder.add(first, column[0], source, prob)
            for token in column[1:]:
                node = builder.add(node, token, source, prob)

    def last_nodes(self, tree: DraftTree) -> list[int | None]:
        """For every column the node of its last token; None where the tree was cut above it."""
        child = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
        ends: list[int | None] = []
        first: int | None = 0
        for column in self.columns:
            first = None if first is None else child.get((first, column[0]))
            node = first
            for token in column[1:]:
                node = None if node is None else child.get((node, token))
            ends.append(node)
        return ends

    def advance(self, answers: Sequence[int | None]) -> list[tuple[int, ...]]:
        """Takes the target's choice behind each column and returns the n-grams that this completes.

        A full column drops its oldest guess for the new one: it moves on by a place, as the last token does in a cycle
        that accepts nothing. A column without an answer stays as it is.
        """
        completed = []
        for index, (column, answer) in enumerate(zip(self.columns, answers, strict=True)):
            if answer is not None:
                ngram = (*column, answer)
                if len(column) == self._depth:
                    completed.append(ngram)
                self.columns[index] = ngram[-self._depth :]
        return completed
