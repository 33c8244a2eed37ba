"""Lookahead decoding: the target refines a window of guesses in the same pass that verifies candidates.

The tree of a cycle has two parts, both below the root. Candidates are n-grams of the pool that start with the root's
token. The window (``sources/lookahead.py``) produces new n-grams: the target's choice after each column completes one
for the pool. A window guess that is right is accepted like any other.
"""

from dataclasses import dataclass
from typing import NamedTuple

from draftwood.drafters.base import Drafter, DraftRequest, VerifiedTree
from draftwood.drafters.checks import check_flag, check_int
from draftwood.sources import JacobiWindow, NgramPool
from draftwood.tree import DraftTree, TreeBuilder

MIN_WINDOW_BUDGET = 4  # smaller budgets have candidates only
# Assumed probability of a guess given its parent. For first tokens of candidates it halves with each older candidate,
# but never falls below the window's, so that a node which both suggest is attributed to the pool.
POOL_PROB, WINDOW_PROB = 0.4, 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class LookaheadOptions:
    window: int = 15  # columns: positions ahead that are guessed in parallel
    ngram: int = 5  # tokens per n-gram; a column has one less
    guesses: int = 15  # candidates per cycle, and n-grams kept per first token
    pool_limit: int = 16_384  # maximum number of n-grams in the pool
    prompt_ngrams: bool = True  # also add n-grams of the prompt and the output to the pool

    def __post_init__(self) -> None:
        check_int(self, 1, "window", "guesses", "pool_limit")
        check_int(self, 2, "ngram")
        check_flag(self, "prompt_ngrams")


class WindowShape(NamedTuple):
    width: int  # columns
    depth: int  # tokens per full column


def fit_window(options: LookaheadOptions, budget: int) -> WindowShape:
    """The configured window, reduced to half of the budget if the candidates need the other half."""
    depth = options.ngram - 1
    room = budget - 1
    share = max(room // 2, room - options.guesses * depth)
    if budget < MIN_WINDOW_BUDGET:
        return WindowShape(0, depth)
    depth = min(depth, share)
    return WindowShape(min(options.window, share // depth), depth)


class LookaheadDrafter(Drafter):
    """Pool candidates and the window in one tree. Use a fixed budget: ``auto`` prunes the window, whose nodes are
    rarely accepted, and then only n-grams of the text are left.

    Columns do not shift when a cycle accepts several tokens; they then guess positions further ahead than they were
    made for. Shifting and refilling them was no better in a small trial. The window advances by the target's greedy
    choices, before temperature and penalties.
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
        self._window: JacobiWindow | None = None  # created when the budget is known
        self._tail = list(request.prompt_ids)[-options.ngram :]  # the latest tokens
        if options.prompt_ngrams:
            self._pool.add_text(request.prompt_ids, options.ngram)

    def propose(self, budget: int) -> DraftTree:
        shape = fit_window(self.options, budget)
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
        """Add candidates, latest first, until the tree has ``size`` nodes; the last one may be truncated."""
        for rank, ngram in enumerate(self._pool.starting_with(self._tail[-1])):
            node, prob = 0, max(WINDOW_PROB, POOL_PROB * 0.5**rank)
            for token in ngram[1:]:
                if len(builder) >= size and builder.find(node, token) is None:
                    return
                node = builder.add(node, token, "pool", prob)
                prob = POOL_PROB

    def _advance_window(self, verified: VerifiedTree) -> list[tuple[int, ...]]:
        """Advance the window by the target's greedy choices; return the completed n-grams."""
        if self._window is None:
            return []
        ends = self._window.last_nodes(verified.tree)
        return self._window.advance([None if node is None else verified.choices[node] for node in ends])
