"""Draw a draft tree as text: one node per line, an only child below its parent, siblings as branches."""

from collections.abc import Iterator
from typing import Any

from draftwood.cli.console import BOLD, BONUS_SOURCE, DIM, GREEN, Paint, pluralize, quote, width
from draftwood.engine import TokenEvent
from draftwood.text import TextCodec
from draftwood.tree import DraftTree

MIN_WIDTH = 20


def tree_lines(event: TokenEvent, codec: TextCodec, paint: Paint) -> list[str]:
    """Draw the verified tree with its accepted path, and the bonus token below."""
    tree = event.tree
    accepted = set(event.path[1 : len(event.token_ids) + 1])
    rows = [(node, branch, quote(codec.token_text(tree.tokens[node]))) for node, branch in _walk(tree)]
    column = max(MIN_WIDTH, *(width(branch + token) for _, branch, token in rows))
    names = max(6, *map(len, tree.sources))
    lines = []
    for node, branch, token in rows:
        kept = node in accepted
        shown = paint.source(token, tree.sources[node]) if kept or node == 0 else paint(token, DIM)
        gap = " " * (column - width(branch + token))
        figures = f"{tree.sources[node]:{names}}  {'' if node == 0 else format(tree.probs[node], '.3f'):5}"
        mark = paint("✓", BOLD, GREEN) if kept else ""
        lines.append(f"  {paint(branch, DIM)}{shown}{gap}  {paint(figures, DIM)}  {mark}".rstrip())
    if event.sources[-1] == BONUS_SOURCE:
        token = quote(codec.token_text(event.token_ids[-1]))
        gap = " " * (column - width(token))
        lines.append(f"  {paint(token, BOLD)}{gap}  {paint(f'{BONUS_SOURCE:{names}}  bonus', DIM)}")
    return lines


def format_heading(cycle: int, event: TokenEvent) -> str:
    """Summarize a cycle. The number of nodes includes the root, as the budget does."""
    drawn = f"{pluralize(len(event.tree), 'node')}, depth {max(event.tree.depths)}"
    kept = sum(source != BONUS_SOURCE for source in event.sources)
    return f"cycle {cycle}: {drawn}, {kept} accepted, {pluralize(len(event.token_ids), 'token')} emitted"


def as_dict(cycle: int, event: TokenEvent, codec: TextCodec) -> dict[str, Any]:
    tree = event.tree
    return {
        "cycle": cycle,
        "tokens": list(tree.tokens),
        "texts": [codec.token_text(token) for token in tree.tokens],
        "parents": list(tree.parents),
        "depths": list(tree.depths),
        "sources": list(tree.sources),
        "probs": list(tree.probs),
        "path": list(event.path),
        "emitted": list(event.token_ids),
        "bonus": event.token_ids[-1] if event.sources[-1] == BONUS_SOURCE else None,
        "finish_reason": event.finish_reason,
    }


def _walk(tree: DraftTree) -> Iterator[tuple[int, str]]:
    """Yield each node with the branch before it, in the order of lines. Not recursive: trees are deep."""
    children = tree.children()
    waiting = [(0, "", "")]  # node, its branch, indentation of its descendants
    while waiting:
        node, branch, indent = waiting.pop()
        yield node, branch
        below = children[node]
        if len(below) == 1:
            waiting.append((below[0], indent, indent))
            continue
        for child in reversed(below):
            own, rest = ("└─ ", "   ") if child == below[-1] else ("├─ ", "│  ")
            waiting.append((child, indent + own, indent + rest))
