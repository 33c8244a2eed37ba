"""Lookahead decoding: n-grams from a window of guesses that the target improves in the same pass that verifies.

The tree of a cycle has two parts, both below the root. Candidates are n-grams of the pool that start with the root's
token. The window (see ``sources/lookahead.py``) is there for its answers: the target's choice behind each column makes
an n-gram for the pool. Where a guess of the window is right, it counts like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from draftwood.drafters.base import Drafter, DraftRequest, VerifiedTree
from draftwood.drafters.checks import check_flag, check_int
from draftwood.sources import JacobiWindow, NgramPool
from draftwood.tree import DraftTree, TreeBuilder

MIN_WINDOW_BUDGET = 4  # with fewer positions there are candidates only
# What to think of a guess given its parent. The first tokens of candidates share what they have by recency, and none is
# below the window, so that a node both suggest is the pool's.
POOL_PROB, WINDOW_PROB = 0.4, 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class LookaheadOptions:
    window: int = 15  # columns: places ahead that are guessed at in parallel
    ngram: int = 5  # tokens of an n-gram; a column has one less
    guesses: int = 15  # candidates verified a cycle, and n-grams kept of each first token
    pool_limit: int = 16_384  # n-grams kept in all
    prompt_ngrams: bool = True  # whether n-grams of the prompt and of the output enter the pool too

    def __post_init__(self) -> None:
        check_int(self, 1, "window", "guesses", "pool_limit")
        check_int(self, 2, "ngram")
        check_flag(self, "prompt_ngrams")


class WindowShape(NamedTuple):
    width: int  # columns
    depth: int  # tokens of a full column


def window_shape(options: LookaheadOptions, budget: int) -> WindowShape:
    """The window asked for, or what fits into a half of the budget where the candidates need the other half."""
    depth = options.ngram - 1
    room = budget - 1
    share = max(room // 2, room - options.guesses * depth)
    if budget < MIN_WINDOW_BUDGET:
        return WindowShape(0, depth)
    depth = min(depth, share)
    return WindowShape(min(options.window, share // depth), depth)


class LookaheadDrafter(Drafter):
    """`lookahead`: pool candidates and the window in one tree; give it a number as budget.

    The columns stay as they are however many tokens a cycle accepts: after several they are guesses for places further
    ahead than they were made for. Rolling them back to those places and refilling was no better in a small trial.
    The window's answers are the target's greedy choices, before temperature and penalties.
    It needs a number as budget: ``auto`` cuts the window away, since its nodes are there to be learnt from and hardly
    ever accepted, and what is left works from n-grams of the text alone.
    """

    name = "lookahead"
    summary = "Lookahead decoding: n-grams from a Jacobi window in the verification pass; needs a fixed budget"
    guesses_from = "n-grams that the target generates in a window of the same pass"
    tree_shape = "n-gram candidates and window in one tree"
    Options = LookaheadOptions

    def begin(self, request: DraftRequest) -> None:
        options = self.options
        self._pool = NgramPool(options.guesses, options.pool_limit)
        self._first_row = request.rng.choice(request.prompt_ids, size=options.window).tolist()
        self._window: JacobiWindow | None = None  # made when the budget is known
        self._tail = list(request.prompt_ids)[-options.ngram :]  # the latest tokens
        if options.prompt_ngrams:
            self._pool.add_text(request.prompt_ids, options.ngram)

    def propose(self, budget: int) -> DraftTree:
        shape = window_shape(self.options, budget)
        if self._window is None:
            self._window = JacobiWindow(self._first_row, shape.depth)
        self._window.shrink(*shape)
        builder = TreeBuilder(self._tail[-1])
        self._place_candidates(builder, budget - len(self._window))
        self._window.place(builder, "window", WINDOW_PROB)
        return builder.build()

    def observe(self, verified: VerifiedTree) -> None:
        for ngram in self._advance_window(verified):
            self._pool.add(ngram)
        text = [*self._tail[1 - self.options.ngram :], *verified.emitted]
        if self.options.prompt_ngrams:
            self._pool.add_text(text, self.options.ngram)
        self._tail = text[-self.options.ngram :]

    def _place_candidates(self, builder: TreeBuilder, size: int) -> None:
        """Adds candidates, the latest first, until the tree has ``size`` nodes; the last one may be cut."""
        for rank, ngram in enumerate(self._pool.starting_with(self._tail[-1])):
            node, prob = 0, max(WINDOW_PROB, POOL_PROB * 0.5**rank)
            for token in ngram[1:]:
                if len(builder) >= size and builder.find(node, token) is None:
                    return
                node = builder.add(node, token, "pool", prob)
                prob = POOL_PROB

    def _advance_window(self, verified: VerifiedTree) -> list[tuple[int, ...]]:
        """Moves the window on by the target's greedy choices, and returns the n-grams found."""
        if self._window is None:
            return []
        ends = self._window.last_nodes(verified.tree)
        return self._window.advance([None if node is None else verified.choices[node] for node in ends])
