"""Trees whose shape does not depend on the guesses: a fixed shape, or the same number of children everywhere."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

from draftwood.growth.best_first import Lookup
from draftwood.growth.spine import BRANCH, SPINE, Anchor
from draftwood.tree import DraftTree, TreeBuilder, TreeShape

NOTHING = -1  # pads short rows of successors

Candidate = tuple[int, float, str]  # token, score, source


class Place(NamedTuple):
    """A node whose children are being looked up."""

    node: int
    previous: int  # token before it
    token: int
    spine_depth: int  # depth on the spine; -1: not on the spine


Candidates = Callable[[Place], list[Candidate]]  # the children of a node, best first


def fill(shape: TreeShape, anchor: Anchor, candidates: Candidates, route: str = "") -> DraftTree:
    """Fill a shape as far as there are candidates: child r of a node is its r-th best candidate."""
    builder = TreeBuilder(anchor.root)
    places: list[Place | None] = [Place(0, anchor.previous, anchor.root, 0), *[None] * (len(shape) - 1)]
    ranked: dict[int, list[Candidate]] = {}
    for number, (above, rank) in enumerate(zip(shape.parents, shape.ranks, strict=True)):
        parent = places[above] if number else None
        if parent is None:
            continue
        children = ranked.get(above)
        if children is None:
            children = ranked[above] = candidates(parent)
        if rank < len(children):
            token, score, source = children[rank]
            node = builder.add(parent.node, token, source, score)
            deeper = parent.spine_depth + 1 if source == SPINE else -1
            places[number] = Place(node, parent.token, token, deeper)
    return builder.build(route=route if len(builder) > 1 else "")


def fill_breadth_first(anchor: Anchor, candidates: Candidates, arity: int, budget: int, route: str = "") -> DraftTree:
    """Add ``arity`` children per node, level by level, until the budget is used up or candidates run out."""
    builder = TreeBuilder(anchor.root)
    queue = deque([Place(0, anchor.previous, anchor.root, 0)])
    while queue and len(builder) < budget:
        parent = queue.popleft()
        for token, score, source in candidates(parent)[: min(arity, budget - len(builder))]:
            node = builder.add(parent.node, token, source, score)
            queue.append(Place(node, parent.token, token, parent.spine_depth + 1 if source == SPINE else -1))
    return builder.build(route=route if len(builder) > 1 else "")


def lookup_candidates(lookup: Lookup) -> Candidates:
    """Use successors as candidates."""

    def candidates(place: Place) -> list[Candidate]:
        tokens, scores = lookup(place.previous, place.token)
        if tokens and tokens[-1] < 0:  # padded
            tokens = tokens[: tokens.index(NOTHING)]
        return list(zip(tokens, scores, repeat(BRANCH), strict=False))

    return candidates


def spine_candidates(spine: Sequence[int], trust: Sequence[float], others: Candidates) -> Candidates:
    """Rank the next spine token first, then the other candidates."""

    def candidates(place: Place) -> list[Candidate]:
        depth = place.spine_depth
        if not 0 <= depth < len(spine):
            return others(place)
        token = spine[depth]
        return [(token, trust[depth], SPINE), *(other for other in others(place) if other[0] != token)]

    return candidates
