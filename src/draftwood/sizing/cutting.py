"""The trees of a batch, cut to the nodes that pay: those with the largest chances, whichever requests they belong to,
as many as maximise the expected tokens per second of the whole batch. Drafters that learn from every verified node gain
from unlikely ones too, later: that counts as well.

A child is never likelier than its parent, so the likeliest nodes form trees. The same steps exist in C
(compiled/sizing.h), with identical results.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, repeat
from operator import add, mul
from typing import NamedTuple

import numpy as np

from draftwood.sizing.chances import DISCOUNT, FADE, RULES_ADDRESS, CompiledGuesses, Guesses
from draftwood.tree import DraftTree, Forest, pack_places


class Offers(NamedTuple):
    """The trees that drafters offer for some requests, and their limits: one entry per request in every column."""

    trees: Sequence[DraftTree]
    rooms: Sequence[int]  # nodes that fit into the cache, at least 1
    max_depths: Sequence[int]  # guesses beyond them cannot be emitted
    lessons: Sequence[float]  # tokens that later trees gain from the first node that is verified; others teach less


class PassCosts(NamedTuple):
    """Costs and yield of the pass that the trees share with other requests."""

    seconds: array[float]  # of passes over 1, 2, ... positions in all
    others: int  # positions of other requests
    tokens: float  # expected from other requests
    fixed: float  # seconds outside the pass, whatever is kept
    per_node: float = 0.0  # seconds outside the pass for each guess


class Cut(NamedTuple):
    trees: list[DraftTree]
    expected: list[float]  # tokens of each request
    # By request, of the values that its drafter gives to paths:
    least: list[float]  # the lowest of a kept guess; 1: none was kept
    most: list[float]  # the highest of one that might have been kept; 0: all were


def cut_trees(guesses: Sequence[Guesses], offers: Offers, costs: PassCosts) -> Cut:
    """``guesses``: what is known about the chances of each request."""
    compiled = [each for each in guesses if isinstance(each, CompiledGuesses)]
    if len(compiled) == len(offers.trees) > 0:
        return _cut_in_c(compiled, offers, costs)
    return _cut_in_python(guesses, offers, costs)


def best_size(chances: Sequence[float], costs: PassCosts) -> tuple[int, float]:
    """The number of nodes that maximises tokens per second, and their expected tokens; chances are sorted."""
    tokens = list(accumulate(chances, initial=costs.tokens))[1:]  # [nodes] by size
    seconds = costs.seconds[costs.others : costs.others + len(tokens)]
    rates = [count / (time + costs.fixed) for count, time in zip(tokens, seconds, strict=True)]
    size = rates.index(max(rates)) + 1
    return size, 1.0 + (tokens[size - 1] - tokens[0]) / DISCOUNT


def _cut_in_c(compiled: Sequence[CompiledGuesses], offers: Offers, costs: PassCosts) -> Cut:
    trees, count = offers.trees, len(compiled)
    places = pack_places(trees)  # first, since a new source moves the records
    records = array("q", [each.address() for each in compiled])
    limits = array("q", offers.rooms), array("q", offers.max_depths), array("d", offers.lessons)
    forest = Forest(sum([tree.size for tree in trees]), count)
    expected = array("d", bytes(24 * count))
    done = compiled[0].core.cut(
        count,
        places,
        records.buffer_info()[0],
        *[column.buffer_info()[0] for column in limits],
        RULES_ADDRESS,
        costs.tokens,
        costs.seconds.buffer_info()[0] + 8 * costs.others,
        costs.fixed,
        costs.per_node,
        forest.capacity,
        forest.address,
        forest.probs_address,
        forest.places.buffer_info()[0],
        *[expected.buffer_info()[0] + 8 * part * count for part in range(3)],
    )
    if not done:
        raise MemoryError(f"trees of {forest.capacity} nodes")
    parts = DraftTree.all_in(forest, [tree.route for tree in trees])
    kept = [tree if tree.size == part.size else part for tree, part in zip(trees, parts, strict=True)]
    found = expected.tolist()
    return Cut(kept, found[:count], found[count : 2 * count], found[2 * count :])


def _cut_in_python(guesses: Sequence[Guesses], offers: Offers, costs: PassCosts) -> Cut:
    chances = [
        [1.0, *(chance * DISCOUNT for chance in each.chances(tree))]
        for each, tree in zip(guesses, offers.trees, strict=True)
    ]
    candidates = [
        (number, node)
        for number, (tree, room, max_depth, _) in enumerate(zip(*offers, strict=True))
        for node in range(1, min(room, len(tree)))
        if tree.depths[node] <= max_depth
    ]
    values = [
        [0.0, *map(add, own[1:], accumulate(repeat(FADE, len(own) - 2), mul, initial=lesson))]
        for own, lesson in zip(chances, offers.lessons, strict=True)
    ]
    ranked = np.argsort([-np.float32(values[number][node]) for number, node in candidates], kind="stable")
    order = [candidates[index] for index in ranked]  # of equals the earlier first
    tokens, count = costs.tokens, len(chances)
    positions = costs.others + count
    for _ in range(count):
        tokens += 1.0
    best, best_rate = 0, tokens / (costs.seconds[positions - 1] + costs.fixed)
    for size, (number, node) in enumerate(order, start=1):
        tokens += values[number][node]
        rate = tokens / (costs.seconds[positions + size - 1] + costs.fixed + costs.per_node * size)
        if rate > best_rate:
            best, best_rate = size, rate
    kept: list[list[int]] = [[0] for _ in range(count)]
    for number, node in order[:best]:
        kept[number].append(node)
    trees = [tree.select(sorted(nodes)) for tree, nodes in zip(offers.trees, kept, strict=True)]
    expected = [1.0] * count
    for number, nodes in enumerate(kept):
        for node in sorted(nodes)[1:]:
            expected[number] += chances[number][node] / DISCOUNT
    least, most = [1.0] * count, [0.0] * count
    own = [tree.values() for tree in offers.trees]
    for number, node in order[:best]:
        least[number] = min(least[number], own[number][node])
    for number, node in order[best:]:
        most[number] = max(most[number], own[number][node])
    return Cut(trees, expected, least, most)
