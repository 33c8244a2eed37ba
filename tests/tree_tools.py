"""What the tests of tree training share: a target and a head asked about one path at a time, the plainest way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from draftwood.heads import Eagle3Head, EagleHead
from draftwood.target.base import Segment, Target, chain_parents
from draftwood.train.base import Batch, Example, Signals

from .head_tools import GrowingCache, random_head
from .train_tools import MODEL, target_of

DraftHead = EagleHead | Eagle3Head


def draft_head(kind: str, seed: int = 0, **changes: Any) -> DraftHead:
    """A random head, bound; EAGLE-3 heads have a vocabulary of their own."""
    if kind == "eagle3":
        changes = {"draft_vocab_size": 120, **changes}
    head = random_head(kind, MODEL, seed, **changes)
    assert isinstance(head, (EagleHead, Eagle3Head))
    head.bind(target_of().parts())
    return head


def said_behind(target: Target, tokens: Sequence[int]) -> Tensor:
    """The target's log-probabilities behind a text, [V]."""
    sequence = target.open(len(tokens))
    try:
        output = target.forward([Segment(sequence, list(tokens), chain_parents(len(tokens)), 1)])
        return output.logits[0].clone().log_softmax(dim=-1)
    finally:
        target.close(sequence)


def followed(head: DraftHead, text: Sequence[int], taps: Tensor, root: int, path: Sequence[int]) -> Tensor:
    """The head's output behind ``path`` below position ``root``, [H]: pair after pair of the text with the target's
    features, then token after token with the head's own. With gradients."""
    cache = GrowingCache()
    features = head.fuse(taps)
    tokens = [*text[1 : root + 1], *path]
    output = torch.empty(0)
    for pair, token in enumerate(tokens):
        feature = features[pair] if pair < root else output
        embed = head.embed(torch.tensor([token]))
        output = head(embed, feature[None], torch.tensor([pair]), cache.attend)[0]
    return output


def read(example: Example, signals: Signals, row: int = 0) -> tuple[list[int], Tensor]:
    """A text and its taps, without padding."""
    size = len(example.token_ids)
    return example.token_ids.tolist(), signals.taps[row, :size]


def path_to(parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], depth: int, node: int) -> list[int]:
    """The tokens down to a node of row ``depth``, from 0, of a tree in rows."""
    path: list[int] = []
    for row in range(depth, -1, -1):
        path.append(tokens[row][node])
        node = parents[row][node]
    return path[::-1]


def batch_and_signals(examples: Sequence[Example], frozen: Any) -> tuple[Batch, Signals]:
    batch = Batch.of(examples)
    return batch, frozen.signals(batch)
