"""Jacobi n-grams: a window of guesses that the target itself refines, and a pool of the resulting n-grams.

A window has columns. Column j guesses the tokens from position j after the last token on; its first token is the oldest
guess. The first tokens of all columns form a chain, and the rest of a column is below its first token::

    root - a0 - b0 - c0           columns (a0 a1 a2), (b0 b1 b2), (c0 c1 c2)
            |    |    |
            a1   b1   c1          row 1 of column j attends to the root, row 0 up to column j, and its own column
            |    |    |
            a2   b2   c2

This is part of a draft tree, so a window is verified like any other guesses. The target's choice after the end of a
column completes an n-gram and becomes the new last token of the column.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from draftwood.tree import DraftTree, TreeBuilder


class NgramPool:
    """N-grams by first token, latest first. Both the n-grams per token and their total number are bounded."""

    def __init__(self, per_token: int, limit: int) -> None:
        self._per_token = per_token
        self._limit = limit
        self._by_first: dict[int, OrderedDict[tuple[int, ...], None]] = {}  # oldest first
        self._all: OrderedDict[tuple[int, ...], None] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._all)

    def add(self, ngram: tuple[int, ...]) -> None:
        """Add an n-gram, or make a known one the latest."""
        siblings = self._by_first.setdefault(ngram[0], OrderedDict())
        for order in (siblings, self._all):
            order[ngram] = None
            order.move_to_end(ngram)
        if len(siblings) > self._per_token:
            self._remove(next(iter(siblings)))
        if len(self._all) > self._limit:
            self._remove(next(iter(self._all)))

    def add_text(self, tokens: Sequence[int], size: int) -> None:
        """Add all n-grams of a text; only the last ones if there are more than the pool holds."""
        for start in range(max(0, len(tokens) - size + 1 - self._limit), len(tokens) - size + 1):
            self.add(tuple(tokens[start : start + size]))

    def starting_with(self, token: int) -> list[tuple[int, ...]]:
        """The n-grams with this first token, latest first."""
        return list(reversed(self._by_first.get(token, ())))

    def _remove(self, ngram: tuple[int, ...]) -> None:
        del self._all[ngram]
        siblings = self._by_first[ngram[0]]
        del siblings[ngram]
        if not siblings:
            del self._by_first[ngram[0]]


class JacobiWindow:
    """Columns of guesses, each up to ``depth`` tokens. It starts with one row and gains one row per cycle."""

    def __init__(self, first_row: Iterable[int], depth: int) -> None:
        self.columns: list[tuple[int, ...]] = [(token,) for token in first_row]
        self._depth = depth

    def __len__(self) -> int:
        """Maximum number of tree nodes of the window; equal guesses share a node."""
        return sum(map(len, self.columns))

    def shrink(self, width: int, depth: int) -> None:
        """Permanently drop excess columns and the oldest guesses."""
        self._depth = min(depth, self._depth)
        self.columns = [column[-self._depth :] for column in self.columns[:width]]

    def place(self, builder: TreeBuilder, source: str, prob: float) -> None:
        """Add the window to a tree column by column, so that a truncated tree still has whole columns."""
        first = 0
        for column in self.columns:
            node = first = builder.add(first, column[0], source, prob)
            for token in column[1:]:
                node = builder.add(node, token, source, prob)

    def last_nodes(self, tree: DraftTree) -> list[int | None]:
        """For every column the node of its last token; None if the tree was truncated above it."""
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

    def advance(self, choices: Sequence[int | None]) -> list[tuple[int, ...]]:
        """Append the target's choice after each column; return the completed n-grams.

        A full column drops its oldest guess: it moves on by one position, as the last token does in a cycle that
        accepts nothing. A column without a choice does not change.
        """
        completed = []
        for index, (column, choice) in enumerate(zip(self.columns, choices, strict=True)):
            if choice is not None:
                ngram = (*column, choice)
                if len(column) == self._depth:
                    completed.append(ngram)
                self.columns[index] = ngram[-self._depth :]
        return completed
