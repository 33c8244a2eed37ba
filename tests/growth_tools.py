"""What the tests of growing and of shapes share: random tables of successors, and random shapes."""

from __future__ import annotations

from collections.abc import Mapping

from hypothesis import strategies as st

from draftwood.growth.best_first import Lookup, Successors
from draftwood.tree.shapes import TreeShape

NUM_TOKENS = 5

# By the token before and the token itself; rows of tokens and scores, best first.
Table = Mapping[tuple[int, int], Successors]


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Rows of up to three successors, none for some contexts, some scores too small to be used."""
    table = {}
    for previous in range(NUM_TOKENS):
        for token in range(NUM_TOKENS):
            tokens = draw(st.lists(st.integers(0, NUM_TOKENS - 1), max_size=3, unique=True))
            scores = draw(st.lists(st.floats(0.0, 0.6), min_size=len(tokens), max_size=len(tokens)))
            table[previous, token] = tokens, sorted(scores, reverse=True)
    return table


def looked_up_in(table: Table) -> Lookup:
    return lambda previous, token: table.get((previous, token), ([], []))


@st.composite
def shapes(draw: st.DrawFn, max_size: int = 25) -> TreeShape:
    parents, ranks, counts = [-1], [0], [0]
    for node in range(1, draw(st.integers(1, max_size))):
        parent = draw(st.integers(0, node - 1))
        parents.append(parent)
        ranks.append(counts[parent])
        counts[parent] += 1
        counts.append(0)
    return TreeShape(tuple(parents), tuple(ranks))
