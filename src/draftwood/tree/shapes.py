"""Tree shapes: trees without tokens, for drafters whose tree is fixed before its tokens are known.

A node is "the r-th best child of its parent" and is filled with the r-th best token. The root counts as a node, as it
does in a budget. Parents come first and, within that, better nodes, so that the first n nodes of a good tree are a good
tree of n nodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any

from draftwood.disk import new_file, parse_json
from draftwood.errors import OptionError, TreeError

FORMAT, VERSION = "draftwood-tree", 1

# Rough probability that the r-th successor in a table is right: a little under half for the best, 0.24 / (r + 1) for
# the others. A recycling table keeps eight; a tree of 80 nodes uses all of them at the root, and six levels.
_RECYCLING = (0.46, 0.12, 0.08, 0.06, 0.048, 0.04, 0.034, 0.03)
# Optimistic about the best child, so that 625 nodes reach depth 20; the other nine fall slowly.
_INITIAL = (0.72, 0.06, 0.045, 0.036, 0.03, 0.026, 0.022, 0.02, 0.018, 0.016)


@dataclass(frozen=True)
class TreeShape:
    """Node i is the ``ranks[i]``-th best child of ``parents[i]``; ranks count from 0 in order of index."""

    parents: tuple[int, ...]  # [N], parents[0] == -1, parents[i] < i
    ranks: tuple[int, ...]  # [N], ranks[0] == 0

    def __post_init__(self) -> None:
        _check(self.parents, self.ranks)

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def num_children(self) -> tuple[int, ...]:  # [N]
        counts = [0] * len(self)
        for parent in self.parents[1:]:
            counts[parent] += 1
        return tuple(counts)

    @cached_property
    def depths(self) -> tuple[int, ...]:  # [N]
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    def levels(self) -> list[list[int]]:
        """The nodes of every depth, in order of index."""
        levels: list[list[int]] = [[] for _ in range(max(self.depths) + 1)]
        for node, depth in enumerate(self.depths):
            levels[depth].append(node)
        return levels

    def children(self) -> list[list[int]]:
        """For every node its children, best first."""
        lists: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            lists[parent].append(node)
        return lists

    def first(self, size: int) -> TreeShape:
        """The first ``size`` nodes, which form a valid shape since parents and better siblings come first."""
        kept = max(size, 0)
        return TreeShape(self.parents[:kept], self.ranks[:kept])

    def limit_depth(self, depth: int) -> TreeShape:
        """The shape without nodes below ``depth``."""
        kept = [node for node, own in enumerate(self.depths) if own <= depth]
        number = {node: place for place, node in enumerate(kept)}
        return TreeShape(
            (-1, *(number[self.parents[node]] for node in kept[1:])), tuple(self.ranks[node] for node in kept)
        )

    def save(self, path: str | Path, **about: Any) -> None:
        """Write a JSON file atomically. ``about`` documents the origin of the shape."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "parents": list(self.parents),
            "ranks": list(self.ranks),
            "about": about,
        }
        text = json.dumps(content, ensure_ascii=False) + "\n"
        with new_file(Path(path)) as temporary:
            temporary.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> tuple[TreeShape, dict[str, Any]]:
        """Load a shape written by ``save``, and its ``about``."""
        content = _read(Path(path))
        about = content.get("about", {})
        try:
            shape = cls(_read_ints(content, "parents"), _read_ints(content, "ranks"))
        except TreeError as error:
            raise OptionError(f"{path} holds a broken tree shape", got=error, next_step=_SAVE_AGAIN) from error
        if not isinstance(about, dict):
            raise OptionError(f"{path} has an 'about' that is not an object", got=repr(about), next_step=_SAVE_AGAIN)
        return shape, about


_SAVE_AGAIN = "Make it again: draftwood tune --static-tree FILE --prompts PROMPTS"


def chain_tree(length: int) -> TreeShape:
    """A chain of ``length`` nodes below the root."""
    _check_min("A chain's length", length, 0)
    return TreeShape(tuple(range(-1, length)), (0,) * (length + 1))


def spine_tree(widths: Sequence[int], branch_depth: int = 1) -> TreeShape:
    """A spine of ``len(widths)`` nodes whose node i (the root is 0) has ``widths[i]`` chains of ``branch_depth``.

    The spine is the path of best children. Its last node has no branches.
    """
    _check_min("A branch's depth", branch_depth, 1)
    spine_length = len(widths)
    parents, ranks = list(range(-1, spine_length)), [0] * (spine_length + 1)
    for node, width in enumerate(widths):
        _check_min(f"The width at spine node {node}", width, 0)
        for rank in range(1, width + 1):
            start = len(parents)
            parents += [node, *range(start, start + branch_depth - 1)]
            ranks += [rank] + [0] * (branch_depth - 1)
    return TreeShape(tuple(parents), tuple(ranks))


def ranked_tree(acceptance: Sequence[float], budget: int, max_depth: int) -> TreeShape:
    """The ``budget`` nodes with the largest products of ``acceptance`` by rank along their path, best first.

    Ties go to the node nearer the root, then to the lower rank. ``acceptance`` must not rise: then no node has a higher
    value than its parent or an earlier sibling, and always taking the best open node is optimal. The tree is smaller if
    arity and depth leave no room for ``budget`` nodes.
    """
    _check_min("A tree's budget", budget, 1)
    _check_min("A tree's depth", max_depth, 0)
    for rank, (better, worse) in enumerate(pairwise(acceptance), start=1):
        if worse > better:
            raise OptionError(
                "The acceptance by rank must not rise",
                got=f"{better} at rank {rank - 1}, {worse} at rank {rank}",
                next_step="Sort it, or use draftwood.tree.theory.sequoia, which takes any.",
            )
    return grow(lambda _, rank: acceptance[rank] if rank < len(acceptance) else None, budget, max_depth)[0]


def grow(acceptance: Callable[[bool, int], float | None], budget: int, max_depth: int) -> tuple[TreeShape, list[float]]:
    """The ``budget`` nodes with the largest products along their paths, best first, and these products.

    ``acceptance(on_spine, rank)`` is the factor of a child, None if there is no such child; a parent is on the spine if
    all ranks on its path are 0. No child may have a higher value than an earlier sibling.
    """
    parents, ranks, values, on_spine = [-1], [0], [1.0], [True]
    # Open nodes: -value, depth, rank, parent. Taking a node opens its first child and its next sibling.
    open_nodes: list[tuple[float, int, int, int]] = []

    def open_node(rank: int, depth: int, parent: int) -> None:
        factor = acceptance(on_spine[parent], rank) if depth <= max_depth else None
        if factor is not None:
            heappush(open_nodes, (-values[parent] * factor, depth, rank, parent))

    open_node(0, 1, 0)
    while open_nodes and len(parents) < budget:
        negative, depth, rank, parent = heappop(open_nodes)
        node = len(parents)
        parents.append(parent)
        ranks.append(rank)
        values.append(-negative)
        on_spine.append(on_spine[parent] and rank == 0)
        open_node(0, depth + 1, node)
        open_node(rank + 1, depth, parent)
    return TreeShape(tuple(parents), tuple(ranks)), values


def recycling_tree(budget: int = 80) -> TreeShape:
    """The static tree of token recycling: up to 8 children per node and 6 levels, wider under better ranks.

    It is the ranked tree for assumed probabilities of the r-th successor. With 80 nodes the root has all 8 children and
    the best path all 6 levels.
    """
    return ranked_tree(_RECYCLING, budget, max_depth=6)


def initial_tree(budget: int = 625, max_depth: int = 20) -> TreeShape:
    """The initial tree for pruning by visits: many more nodes than are kept, up to 10 children per node.

    It is wide near the root, with long tails along the best ranks; with 625 nodes the longest reaches level 20.
    """
    return ranked_tree(_INITIAL, budget, max_depth)


def prune(shape: TreeShape, counts: Sequence[int], budget: int) -> TreeShape:
    """Keep the ``budget`` most visited nodes, best first; ties go to the node nearer the root, then the lower index.

    A node is visited only with its parent, so the kept nodes form a tree. Kept siblings stay in order and get new ranks
    from 0, since a lookup fills c children with its c best tokens.
    """
    _check_min("A tree's budget", budget, 1)
    if len(counts) != len(shape):
        raise TreeError("There must be one count per node", got=len(counts), allowed=len(shape))
    for node, parent in enumerate(shape.parents[1:], start=1):
        if counts[node] > counts[parent]:
            raise TreeError(
                f"Node {node} was visited more often than its parent",
                got=counts[node],
                allowed=f"up to {counts[parent]}",
            )
    ranking = sorted(range(len(shape)), key=lambda node: (-counts[node], shape.depths[node], node))
    kept = set(ranking[:budget])
    children = [[child for child in group if child in kept] for group in shape.children()]
    return best_first(children, counts)


def best_first(children: Sequence[Sequence[int]], values: Sequence[float]) -> TreeShape:
    """Renumber a tree, given by the children of every node (node 0 is the root), by falling value.

    Parents and earlier siblings still come first; ties go to the node nearer the root, then to the lower rank.
    """
    parents, ranks = [-1], [0]
    open_nodes: list[tuple[float, int, int, int, int]] = []  # -value, depth, rank, new number of parent, old of parent

    def open_node(rank: int, depth: int, parent: int, old_parent: int) -> None:
        if rank < len(children[old_parent]):
            value = values[children[old_parent][rank]]
            heappush(open_nodes, (-value, depth, rank, parent, old_parent))

    open_node(0, 1, 0, 0)
    while open_nodes:
        _, depth, rank, parent, old_parent = heappop(open_nodes)
        node = len(parents)
        parents.append(parent)
        ranks.append(rank)
        open_node(0, depth + 1, node, children[old_parent][rank])
        open_node(rank + 1, depth, parent, old_parent)
    return TreeShape(tuple(parents), tuple(ranks))


def _check_min(what: str, got: int, low: int) -> None:
    if got < low:
        raise OptionError(f"{what} is out of range", got=got, allowed=f"{low} or more")


def _check(parents: Sequence[int], ranks: Sequence[int]) -> None:
    """Raise for the first invariant that the arrays break."""
    if not parents:
        raise TreeError("A tree shape needs at least its root", got="no nodes")
    if len(parents) != len(ranks):
        raise TreeError("The arrays of a tree shape differ in length", got=f"{len(parents)} and {len(ranks)}")
    if parents[0] != -1 or ranks[0] != 0:
        raise TreeError("Node 0 must be the root", got=f"parent {parents[0]}, rank {ranks[0]}", allowed="-1 and 0")
    num_children = [0] * len(parents)
    for node in range(1, len(parents)):
        parent = parents[node]
        if not 0 <= parent < node:
            raise TreeError(f"Node {node} must come after its parent", got=parent, allowed=f"0 to {node - 1}")
        if ranks[node] != num_children[parent]:
            raise TreeError(f"Node {node} has the wrong rank", got=ranks[node], allowed=num_children[parent])
        num_children[parent] += 1


def _read(path: Path) -> dict[str, Any]:
    """Read the JSON object of a file; raise if it is not a tree shape of this version."""
    allowed = f"a JSON file of the format {FORMAT}, version {VERSION}"
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(
            f"The tree shape {path} cannot be read",
            got=error.strerror or error,
            allowed=allowed,
            next_step="Check the path.",
        ) from error
    except ValueError as error:
        raise OptionError(f"{path} is not valid JSON", got=error, allowed=allowed, next_step=_SAVE_AGAIN) from error
    found = content.get("format") if isinstance(content, dict) else None
    if not isinstance(content, dict) or found != FORMAT:
        got = f"the format {found!r}" if isinstance(content, dict) else type(content).__name__
        raise OptionError(f"{path} is not a tree shape", got=got, allowed=allowed, next_step=_SAVE_AGAIN)
    if content.get("version") != VERSION:
        raise OptionError(
            f"{path} is a tree shape of another version",
            got=content.get("version"),
            allowed=VERSION,
            next_step=f"Use the version of draftwood that wrote it. {_SAVE_AGAIN}",
        )
    return content


def _read_ints(content: dict[str, Any], name: str) -> tuple[int, ...]:
    values = content.get(name)
    if not isinstance(values, list):
        raise TreeError(f"'{name}' must be a list", got=type(values).__name__)
    for node, value in enumerate(values):
        if type(value) is not int:
            raise TreeError(f"'{name}' of node {node} is not an integer", got=repr(value))
    return tuple(values)
