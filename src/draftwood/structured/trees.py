"""Draft trees within a structure: guesses that it forbids are cut, text that it forces is added."""

from collections.abc import Sequence
from typing import NamedTuple

from draftwood.structured.matcher import StructureMatcher
from draftwood.tree import DraftTree, TreeBuilder

GRAMMAR_SOURCE = "grammar"
FORCED_PROB = 0.95  # estimates: forced text is rarely written in unusual tokens,
LAST_PROB = 0.6  # but its last token may be one with what follows
CLOSING_PROB = 0.2  # values are longer than a few tokens


class Span(NamedTuple):
    """Text from the structure after a node."""

    node: int
    tokens: Sequence[int]
    prob: float = FORCED_PROB  # of its first token


def constrain(tree: DraftTree, matcher: StructureMatcher, max_size: int) -> DraftTree:
    """The tree without forbidden guesses, and with forced text where there is room; the matcher ends where it was.

    Where children were drawn, forbidden ones stay too, for verification must see them rejected. Nothing stays below
    them. Forced text replaces all drawn children of a node: that does not depend on their tokens.
    """
    kept, spans = _walk(tree, matcher, finds_spans=max_size > 1)
    allowed = tree.select(kept)
    if not spans:
        return allowed
    number = dict(zip(kept, range(len(kept)), strict=True))
    return _add_spans(allowed, [span._replace(node=number[span.node]) for span in spans]).first(max_size)


def _walk(tree: DraftTree, matcher: StructureMatcher, *, finds_spans: bool) -> tuple[list[int], list[Span]]:
    """One walk over the tree: the nodes that stay, and the forced texts after them."""
    below = tree.children()
    kept, spans = [], list[Span]()
    num_taken = 0  # tokens of the current path that the matcher has taken
    waiting = [0]
    while waiting:
        node = waiting.pop()
        above = max(0, tree.depths[node] - 1)
        matcher.go_back(num_taken - above)
        num_taken = above
        if node > 0:
            if not matcher.take(tree.tokens[node : node + 1]):
                if tree.parents[node] in tree.proposals:
                    kept.append(node)
                continue
            num_taken += 1
        kept.append(node)
        if matcher.is_complete:
            continue
        is_drawn = node in tree.proposals
        if finds_spans and (forced := matcher.forced()):
            spans.append(Span(node, forced))
            if is_drawn:
                continue
        elif finds_spans and node == 0 and not is_drawn and (closing := matcher.closing()):
            spans.append(Span(node, closing, CLOSING_PROB))
        waiting += reversed(below[node])
    matcher.go_back(num_taken)
    return sorted(kept), spans


def _add_spans(tree: DraftTree, spans: Sequence[Span]) -> DraftTree:
    """Text that is forced after the root comes first, before all guesses, and other text last: the end of the tree is
    cut if there is no room."""
    builder = TreeBuilder(tree.tokens[0])
    number = [0] * len(tree)
    for span in spans:
        if _comes_first(span):
            _add(builder, 0, span)
    for node in range(1, len(tree)):
        parent = number[tree.parents[node]]
        number[node] = builder.add(parent, tree.tokens[node], tree.sources[node], tree.probs[node])
    for span in spans:
        if not _comes_first(span):
            _add(builder, number[span.node], span)
    proposals = {number[node]: proposal for node, proposal in tree.proposals.items()}
    return builder.build(proposals, {number[node]: count for node, count in tree.num_chosen.items()}, tree.route)


def _comes_first(span: Span) -> bool:
    return span.node == 0 and span.prob == FORCED_PROB


def _add(builder: TreeBuilder, node: int, span: Span) -> None:
    probs = [span.prob, *[FORCED_PROB] * (len(span.tokens) - 2), LAST_PROB]
    for token, prob in zip(span.tokens, probs, strict=False):
        node = builder.add(node, token, GRAMMAR_SOURCE, prob)
