"""Expected yield of trees, and the trees with the highest yield.

The yield tau is the number of tokens that one verification pass emits, including the bonus token, so plain decoding has
tau 1. There are two idealised models of acceptance:

- *two rates*: a copied (spine) token is right with probability p_s, any other token with p_t, independently; the spine
  token is tried first. At most one sibling can be right: the first one that is.
- *by rank*: the r-th best child of an accepted node is right with probability ``acceptance[r]``. A single rate p_t is
  the special case ``p_t * (1 - p_t)**r``.

In both, the value of a node is the product along its path, and the yield is the sum over all nodes; the root's 1 is the
bonus token. A budget is the number of nodes, the root included.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from draftwood.errors import OptionError
from draftwood.tree.shapes import TreeShape, best_first, grow

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MAX_BUDGET = 10_000
MAX_BRANCH_DEPTH = 64
MAX_SEQUOIA_BUDGET = 1_024  # the time of the dynamic program grows with the square of the budget
IMPOSSIBLE = -np.inf  # the yield of a tree that cannot be built


class SpinePlan(NamedTuple):
    """A spine of ``spine_length`` copied tokens whose node i has ``widths[i]`` chains of ``branch_depth`` nodes."""

    spine_length: int
    widths: tuple[int, ...]  # [spine_length], node 0 is the root
    branch_depth: int
    expected: float  # tokens per pass
    num_nodes: int  # the root included


# -- two rates: spine trees ------------------------------------------------------------------------------------------


def spine_yield(p_s: float, p_t: float, spine_length: int, widths: Sequence[int], branch_depth: int) -> float:
    """E[tau] = 1 + sum_{i=1..m} p_s^i + sum_{i=0..m-1} p_s^i (1 - p_s) phi_i (1 + l), m the spine's length.

    ``phi_i = 1 - (1 - p_t)^widths[i]``: one of the branches at node i is right.
    ``l = sum_{j=1..D-1} p_t^j``: the yield of a chain of D nodes after its first node. Exact for branches that are
    chains of ``branch_depth`` nodes, a lower bound for branches that branch again.
    """
    _check_rates(p_s, p_t)
    if len(widths) != spine_length:
        raise OptionError("There must be one width per spine node", got=len(widths), allowed=spine_length)
    return _spine(p_s, spine_length) + _synergy(p_s, p_t, np.asarray(widths, dtype=np.int64), branch_depth)


def harmonic_widths(spine_length: int, num_branches: int) -> tuple[int, ...]:
    """GOOSE's rule, which needs no rates: the i-th node (from 1) gets ``floor(n / i / (1 + 1/2 + ... + 1/m))``.

    Rounding down leaves some of the n branches unused.
    """
    shares = 1 / np.arange(1, spine_length + 1)
    return tuple(np.floor(num_branches * shares / max(shares.sum(), 1.0) + 1e-9).astype(int).tolist())


def optimal_widths(p_s: float, p_t: float, spine_length: int, num_branches: int) -> tuple[int, ...]:
    """The widths with the largest yield: ``w_i = w_0 - i * |ln p_s| / |ln(1 - p_t)|``, at least 0, rounded.

    w_0 is chosen so that they sum to ``num_branches``. Rounding up the nodes with the largest fractions is again a
    common threshold on the marginal gain ``p_s^i (1 - p_t)^w``, so integer widths stay optimal.
    """
    _check_rates(p_s, p_t)
    num_nodes = _nodes_with_branches(p_s, p_t, spine_length, num_branches)
    used = _linear_widths(p_s, p_t, num_nodes, num_branches).tolist()
    return (*used, *(0,) * (spine_length - len(used)))


def spine_yields(p_s: float, p_t: float, budget: int, branch_depth: int, *, free_chains: bool = False) -> FloatArray:
    """The yield for every spine length from 1 to ``budget - 1``, the rest of the budget in optimal branches.

    A branch costs ``branch_depth`` nodes. With ``free_chains`` it costs one, which is how the GOOSE paper counts.
    """
    _check_rates(p_s, p_t)
    _check_sizes(budget, branch_depth)
    cost = 1 if free_chains else branch_depth
    yields = np.empty(budget - 1)  # [B-1]
    synergies: dict[tuple[int, int], float] = {}  # lengths beyond the last branch share one
    for spine_length in range(1, budget):
        num_branches = (budget - 1 - spine_length) // cost
        key = (_nodes_with_branches(p_s, p_t, spine_length, num_branches), num_branches)
        if key not in synergies:
            synergies[key] = _synergy(p_s, p_t, _linear_widths(p_s, p_t, *key), branch_depth)
        yields[spine_length - 1] = _spine(p_s, spine_length) + synergies[key]
    return yields


def best_spine(p_s: float, p_t: float, budget: int, branch_depth: int, *, free_chains: bool = False) -> SpinePlan:
    """The spine tree of at most ``budget`` nodes and branches up to ``branch_depth`` with the largest yield.

    Searches all spine lengths and chain depths; ties go to the shorter. With ``free_chains`` only the
    first node of a branch counts, so ``num_nodes`` may be larger than the budget.
    """
    _check_sizes(budget, branch_depth)
    plans = []
    for depth in [branch_depth] if free_chains else range(1, min(branch_depth, budget - 1) + 1):
        yields = spine_yields(p_s, p_t, budget, depth, free_chains=free_chains)
        plans.append((float(yields.max()), -depth, int(yields.argmax()) + 1))
    expected, depth, spine_length = max(plans)
    depth = -depth
    num_branches = (budget - 1 - spine_length) // (1 if free_chains else depth)
    widths = optimal_widths(p_s, p_t, spine_length, num_branches)
    return SpinePlan(spine_length, widths, depth, expected, 1 + spine_length + depth * num_branches)


def chain_yield(rate: float, length: int) -> float:
    """``1 + rate + rate^2 + ... + rate^length``: a chain of ``length`` nodes below the root."""
    _check_rates(rate, rate)
    return _spine(rate, length)


def two_rate_tree(p_s: float, p_t: float, budget: int) -> tuple[TreeShape, float]:
    """The best of all trees in the model of two rates, for p_s >= p_t, and its yield.

    Every node, branch nodes included, may have any number of children. Its value is the product along its path: p_s per
    step on the spine, ``(1 - p_s) p_t (1 - p_t)^r`` from the spine to its branch r, ``p_t (1 - p_t)^r`` below a branch.
    No node has a higher value than its parent or an earlier sibling, so taking the best open node is optimal. The spine
    is the path of ranks 0. If p_t is large and p_s hardly larger, a spine tree whose branches are chains yields less,
    even less than a k-ary tree: there it pays to branch again.
    """
    _check_rates(p_s, p_t)
    _check_sizes(budget, 1)
    if p_s < p_t:
        raise OptionError("The spine must be the better source", got=f"p_s {p_s}, p_t {p_t}", allowed="p_s >= p_t")

    def acceptance(on_spine: bool, rank: int) -> float:
        if not on_spine:
            return p_t * (1 - p_t) ** rank
        return p_s if rank == 0 else (1 - p_s) * p_t * (1 - p_t) ** (rank - 1)

    shape, values = grow(acceptance, budget, max_depth=budget)
    return shape, sum(values)


# -- one rate: isotropic trees ---------------------------------------------------------------------------------------


def geometric_acceptance(p_t: float, num_ranks: int) -> list[float]:
    """``p_t * (1 - p_t)**r``: siblings are right with probability p_t each, and the first right one counts."""
    _check_rates(p_t, p_t)
    return (p_t * (1 - p_t) ** np.arange(num_ranks)).tolist()  # type: ignore[no-any-return]


def isotropic_yield(p_t: float, arity: int, budget: int) -> float:
    """``1 + sum_d (1 - (1 - p_t)^k)^d`` over the full levels of the breadth-first k-ary tree of ``budget`` nodes.

    The last level may be incomplete; its nodes count with their own paths, so the result is exact.
    """
    _check_sizes(budget, 1)
    if arity < 1:
        raise OptionError("A tree's arity is out of range", got=arity, allowed="1 or more")
    return _breadth_first_yield(np.asarray(geometric_acceptance(p_t, min(arity, budget - 1))), budget)


def best_isotropic(p_t: float, budget: int) -> tuple[int, float]:
    """The arity (ties: smallest) whose breadth-first tree of ``budget`` nodes has the highest yield, and that."""
    _check_sizes(budget, 1)
    acceptance = np.asarray(geometric_acceptance(p_t, budget - 1))
    yields = [_breadth_first_yield(acceptance[:arity], budget) for arity in range(1, budget)]
    best = int(np.argmax(yields))
    return best + 1, yields[best]


def _breadth_first_yield(acceptance: FloatArray, budget: int) -> float:
    level, left, expected = np.ones(1), budget - 1, 1.0  # values of one level's nodes, in order
    while left:
        parents = level[: math.ceil(left / len(acceptance))]
        level = np.outer(parents, acceptance).ravel()[:left]
        left -= len(level)
        expected += float(level.sum())
    return expected


# -- by rank: Sequoia ------------------------------------------------------------------------------------------------


def expected_yield(shape: TreeShape, acceptance: Sequence[float]) -> float:
    """The sum over all nodes of the product of ``acceptance[rank]`` along the path; the root's 1 is the bonus token."""
    return sum(_path_values(shape.parents, shape.ranks, acceptance))


def sequoia(acceptance: Sequence[float], budget: int, max_depth: int) -> tuple[TreeShape, float]:
    """The tree of at most ``budget`` nodes and ``max_depth`` levels with the largest expected yield, and that yield.

    Sequoia's dynamic program. With T(n, d) the best yield of n nodes in d levels below an accepted node,
    ``T(n, d) = 1 + max over n_1 + ... + n_k = n - 1 of sum_r acceptance[r] * T(n_r, d - 1)``; children are added one by
    one, maximising over the number of nodes of each. If acceptance does not rise with the rank, ``shapes.ranked_tree``
    finds a tree of the same yield much faster. This program accepts any acceptance, and each is tested with the other.
    """
    _check_acceptance(acceptance)
    if not 1 <= budget <= MAX_SEQUOIA_BUDGET or max_depth < 0:
        raise OptionError(
            "The tree's size is out of range",
            got=f"budget {budget}, depth {max_depth}",
            allowed=f"a budget from 1 to {MAX_SEQUOIA_BUDGET}, a depth of 0 or more",
            next_step="For a larger budget use ranked_tree: it is as good where acceptance falls with the rank.",
        )
    best = _single_node(budget)  # T(., 0)
    levels: list[_Level] = []
    for _ in range(max_depth):
        level = _add_level(best, acceptance)
        if np.array_equal(level.best, best):
            break  # deeper levels do not change it either
        levels.append(level)
        best = level.best
    size = budget - int(best[::-1].argmax())  # the largest tree among equal yields
    children = _reconstruct(levels, size)
    parents, ranks = [-1] * size, [0] * size
    for node, group in enumerate(children):
        for rank, child in enumerate(group):
            parents[child], ranks[child] = node, rank
    shape = best_first(children, _path_values(parents, ranks, acceptance))
    return shape, expected_yield(shape, acceptance)


class _Level(NamedTuple):
    """T(n, d) for one d, and the choices that lead to it."""

    best: FloatArray  # [B+1]
    arity: IntArray  # [B+1], number of children of the root in the best tree of n nodes
    sizes: list[IntArray]  # [arity][B+1], size of the last of k children that have s nodes in total


def _single_node(budget: int) -> FloatArray:
    best = np.full(budget + 1, IMPOSSIBLE)  # [B+1]
    best[1] = 1.0
    return best


def _add_level(below: FloatArray, acceptance: Sequence[float]) -> _Level:
    budget = len(below) - 1
    best, arity = _single_node(budget), np.zeros(budget + 1, dtype=np.int64)
    sizes: list[IntArray] = []
    totals = np.full(budget, IMPOSSIBLE)  # [B], best yield of exactly k children with s nodes in total
    totals[0] = 0.0
    for rank, accepted in enumerate(acceptance[: budget - 1]):
        # [s, j]: j nodes for the next child, s - j for those before it
        padded = np.concatenate([np.full(budget - 1, IMPOSSIBLE), totals])
        before = np.lib.stride_tricks.sliding_window_view(padded, budget)[:, ::-1]
        child = np.full(budget, IMPOSSIBLE)
        np.multiply(accepted, below[:budget], out=child, where=below[:budget] > 0)
        options = before + child
        sizes.append(options.argmax(axis=1))
        totals = options.max(axis=1)
        better = 1 + totals > best[1:]
        best[1:][better] = 1 + totals[better]
        arity[1:][better] = rank + 1
    return _Level(best, arity, sizes)


def _reconstruct(levels: Sequence[_Level], size: int) -> list[list[int]]:
    """The children of every node in the best tree of ``size`` nodes."""
    children: list[list[int]] = [[]]
    waiting = [(0, size, len(levels))]  # node, nodes of its subtree, levels left below it
    while waiting:
        node, nodes, depth = waiting.pop()
        if nodes == 1:
            continue
        level = levels[depth - 1]
        left, parts = nodes - 1, []
        for rank in reversed(range(int(level.arity[nodes]))):
            parts.append(int(level.sizes[rank][left]))
            left -= parts[-1]
        for part in reversed(parts):
            child = len(children)
            children.append([])
            children[node].append(child)
            waiting.append((child, part, depth - 1))
    return children


def _path_values(parents: Sequence[int], ranks: Sequence[int], acceptance: Sequence[float]) -> list[float]:
    _check_acceptance(acceptance)
    if max(ranks) >= len(acceptance) and len(parents) > 1:
        raise OptionError(
            "The acceptance covers too few ranks", got=len(acceptance), allowed=f"{max(ranks) + 1} or more"
        )
    values = [1.0]
    for parent, rank in zip(parents[1:], ranks[1:], strict=True):
        values.append(values[parent] * acceptance[rank])
    return values


# -- helpers and checks ----------------------------------------------------------------------------------------------


def _spine(p_s: float, length: int) -> float:
    return float((1 - p_s ** (length + 1)) / (1 - p_s))


def _synergy(p_s: float, p_t: float, widths: IntArray, branch_depth: int) -> float:
    """Yield of the branches where the spine breaks; ``widths`` may omit trailing zeros."""
    reached = p_s ** np.arange(len(widths)) * (1 - p_s)  # [m], the spine breaks after node i
    found = 1 - (1 - p_t) ** widths  # [m]
    return float(reached @ found) * _spine(p_t, branch_depth - 1)


def _nodes_with_branches(p_s: float, p_t: float, spine_length: int, num_branches: int) -> int:
    """Number of nodes, from the root on, with a positive width in the linear schedule."""
    if spine_length == 0 or num_branches == 0:
        return 0
    if p_s == 0 or p_t == 0:  # nothing below the root is reached, or branches have no effect
        return 1
    # The last of k nodes has a positive width if slope * k * (k - 1) / 2 < num_branches.
    slope = math.log(p_s) / math.log1p(-p_t)
    count = min(spine_length, math.ceil(0.5 + math.sqrt(0.25 + 2 * num_branches / slope)))
    while count > 1 and slope * count * (count - 1) / 2 >= num_branches:
        count -= 1
    return count


def _linear_widths(p_s: float, p_t: float, num_nodes: int, num_branches: int) -> IntArray:
    """The linear schedule over ``num_nodes`` nodes, all with positive width, rounded to integers."""
    if num_nodes < 2:
        return np.full(num_nodes, num_branches, dtype=np.int64)
    slope = math.log(p_s) / math.log1p(-p_t)
    exact = num_branches / num_nodes + slope * ((num_nodes - 1) / 2 - np.arange(num_nodes))  # [k]
    widths: IntArray = np.floor(exact).astype(np.int64)
    missing = num_branches - int(widths.sum())
    widths[np.argsort(widths - exact, kind="stable")[:missing]] += 1
    return widths


def _check_rates(p_s: float, p_t: float) -> None:
    for name, rate in (("p_s, the spine's acceptance,", p_s), ("p_t, the branches' acceptance,", p_t)):
        if not 0 <= rate < 1:  # also rejects NaN
            raise OptionError(f"{name} is not a probability below 1", got=rate, allowed="0 <= p < 1")


def _check_sizes(budget: int, branch_depth: int) -> None:
    if not 2 <= budget <= MAX_BUDGET:
        raise OptionError("The budget is out of range", got=budget, allowed=f"2 to {MAX_BUDGET}, the root included")
    if not 1 <= branch_depth <= MAX_BRANCH_DEPTH:
        raise OptionError("The branch depth is out of range", got=branch_depth, allowed=f"1 to {MAX_BRANCH_DEPTH}")


def _check_acceptance(acceptance: Sequence[float]) -> None:
    if not all(0 <= value <= 1 for value in acceptance) or sum(acceptance) > 1 + 1e-6:
        raise OptionError(
            "The acceptance by rank is not a distribution",
            got=f"{[round(value, 4) for value in acceptance[:8]]}, sum {sum(acceptance):.4f}",
            allowed="values from 0 to 1 that sum to 1 at most: only one child can be the right one",
        )
