"""Cycles in an event stream: the tree that each chunk was taken from. An extension, off by default."""

from typing import Any

from draftwood.engine import CycleDetail, TokenEvent
from draftwood.text import TextCodec

DIGITS = 4  # of probabilities
START = CycleDetail((), (), 0.0, 0.0, 0.0)


class CycleReader:
    """Describes the cycles of one sample, in order."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._number = 0
        self._before = START

    def describe(self, event: TokenEvent) -> dict[str, Any]:
        """``event`` must have a detail."""
        now, before = event.detail, self._before
        assert now is not None
        self._before = now
        self._number += 1
        return {
            "number": self._number,
            "route": event.tree.route,
            "nodes": self._nodes(event, now),
            "tokens": self._tokens(event, now),
            "seconds": {
                "draft": round(now.draft_seconds - before.draft_seconds, 6),
                "verify": round(now.verify_seconds - before.verify_seconds, 6),
                "total": round(now.total_seconds - before.total_seconds, 6),
            },
        }

    def _nodes(self, event: TokenEvent, detail: CycleDetail) -> list[dict[str, Any]]:
        """The tree in topological order; the root comes first."""
        tree = event.tree
        accepted = {0, *event.path[1 : len(event.token_ids) + 1]}
        columns = zip(tree.tokens, tree.parents, tree.sources, tree.probs, detail.target_probs, strict=True)
        return [
            {
                "token": token,
                "text": self._codec.token_text(token),
                "parent": parent,
                "source": source,
                "expected": round(expected, DIGITS),
                "target": round(target, DIGITS),
                "accepted": node in accepted,
            }
            for node, (token, parent, source, expected, target) in enumerate(columns)
        ]

    def _tokens(self, event: TokenEvent, detail: CycleDetail) -> list[dict[str, Any]]:
        """What the cycle added to the output. ``node`` is None for the target's own token."""
        nodes = [*event.path[1:], None]
        columns = zip(event.token_ids, event.texts, event.sources, nodes, detail.emitted_probs, strict=False)
        return [
            {"token": token, "text": text, "source": source, "node": node, "target": round(target, DIGITS)}
            for token, text, source, node, target in columns
        ]
