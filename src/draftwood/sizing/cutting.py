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
from struct import Struct
from typing import NamedTuple

import numpy as np

from draftwood.sizing.chances import DISCOUNT, FADE, RULES_ADDRESS, CompiledGuesses, Guesses
from draftwood.tree import DraftTree, Forest

_LIMITS = Struct("@3qd")  # what ``Offered`` of compiled/sizing.h has beside the tree


class Offer(NamedTuple):
    """The tree that a drafter offers for one request, and its limits."""

    tree: DraftTree
    room: int  # nodes that fit into the cache, at least 1
    max_depth: int  # guesses beyond it cannot be emitted
    lesson: float = 0.0  # tokens that later trees gain from the first node that is verified; others teach less


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


def cut_trees(guesses: Sequence[Guesses], offers: Sequence[Offer], costs: PassCosts) -> Cut:
    """``guesses``: what is known about the chances of each request."""
    compiled = [each for each in guesses if isinstance(each, CompiledGuesses)]
    if len(compiled) == len(offers) > 0:
        return _cut_in_c(compiled, offers, costs)
    return _cut_in_python(guesses, offers, costs)


def best_size(chances: Sequence[float], costs: PassCosts) -> tuple[int, float]:
    """The number of nodes that maximises tokens per second, and their expected tokens; chances are sorted."""
    tokens = list(accumulate(chances, initial=costs.tokens))[1:]  # [nodes] by size
    seconds = costs.seconds[costs.others : costs.others + len(tokens)]
    rates = [count / (time + costs.fixed) for count, time in zip(tokens, seconds, strict=True)]
    size = rates.index(max(rates)) + 1
    return size, 1.0 + (tokens[size - 1] - tokens[0]) / DISCOUNT


def _cut_in_c(compiled: Sequence[CompiledGuesses], offers: Sequence[Offer], costs: PassCosts) -> Cut:
    places = [offer.tree.pack().place for offer in offers]  # first, since a new source moves the records
    given = b"".join(
        [
            place + _LIMITS.pack(each.address(), room, max_depth, lesson)
            for place, each, (_, room, max_depth, lesson) in zip(places, compiled, offers, strict=True)
        ]
    )
    forest = Forest(sum([offer.tree.size for offer in offers]))
    sizes, expected = array("q", bytes(8 * len(offers))), array("d", bytes(24 * len(offers)))
    done = compiled[0].core.cut(
        len(offers),
        given,
        RULES_ADDRESS,
        costs.tokens,
        costs.seconds.buffer_info()[0] + 8 * costs.others,
        costs.fixed,
        costs.per_node,
        forest.capacity,
        forest.address,
        forest.probs_address,
        sizes.buffer_info()[0],
        *[expected.buffer_info()[0] + 8 * part * len(offers) for part in range(3)],
    )
    if not done:
        raise MemoryError(f"trees of {forest.capacity} nodes")
    trees, start = list[DraftTree](), 0
    for (tree, *_), size in zip(offers, sizes, strict=True):
        trees.append(tree if size == tree.size else DraftTree.packed_in(forest, start, size, tree.route))
        start += size
    count, found = len(offers), expected.tolist()
    return Cut(trees, found[:count], found[count : 2 * count], found[2 * count :])


def _cut_in_python(guesses: Sequence[Guesses], offers: Sequence[Offer], costs: PassCosts) -> Cut:
    chances = [
        [1.0, *(chance * DISCOUNT for chance in each.chances(offer.tree))]
        for each, offer in zip(guesses, offers, strict=True)
    ]
    candidates = [
        (number, node)
        for number, (tree, room, max_depth, _) in enumerate(offers)
        for node in range(1, min(room, len(tree)))
        if tree.depths[node] <= max_depth
    ]
    values = [
        [0.0, *map(add, own[1:], accumulate(repeat(FADE, len(own) - 2), mul, initial=offer.lesson))]
        for own, offer in zip(chances, offers, strict=True)
    ]
    ranked = np.argsort([-np.float32(values[number][node]) for number, node in candidates], kind="stable")
    order = [candidates[index] for index in ranked]  # of equals the earlier first
    tokens, positions = costs.tokens, costs.others + len(offers)
    for _ in offers:
        tokens += 1.0
    best, best_rate = 0, tokens / (costs.seconds[positions - 1] + costs.fixed)
    for size, (number, node) in enumerate(order, start=1):
        tokens += values[number][node]
        rate = tokens / (costs.seconds[positions + size - 1] + costs.fixed + costs.per_node * size)
        if rate > best_rate:
            best, best_rate = size, rate
    kept: list[list[int]] = [[0] for _ in offers]
    for number, node in order[:best]:
        kept[number].append(node)
    trees = [offer.tree.select(sorted(nodes)) for offer, nodes in zip(offers, kept, strict=True)]
    expected = [1.0] * len(offers)
    for number, nodes in enumerate(kept):
        for node in sorted(nodes)[1:]:
            expected[number] += chances[number][node] / DISCOUNT
    least, most = [1.0] * len(offers), [0.0] * len(offers)
    own = [tree.values() for tree, *_ in offers]
    for number, node in order[:best]:
        least[number] = min(least[number], own[number][node])
    for number, node in order[best:]:
        most[number] = max(most[number], own[number][node])
    return Cut(trees, expected, least, most)
