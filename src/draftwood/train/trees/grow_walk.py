"""Grow target trees with ordinary forward passes (`walk.py`), for targets that do not expose their layers."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from draftwood.targets import Target
from draftwood.train.trees.labels import Labels, read_labels
from draftwood.train.trees.target_trees import Beam, TextTrees, by_root, no_trees, packed, select_best
from draftwood.train.trees.walk import Block, Load, Nodes, Texts, Walk, group_texts, walking

MAX_TEXTS = 16  # texts whose trees grow at once


def grow_by_passes(
    target: Target, texts: Texts, roots: Texts, beam: Beam, vocabulary: Tensor | None
) -> list[TextTrees]:
    load = Load(branching=beam.width, total=max(1, beam.width * (beam.depth - 1)))
    found: list[TextTrees] = []
    for group in group_texts(target, texts, load, MAX_TEXTS):
        with walking(target, texts[group], roots[group], load) as walk:
            found += _grow_walk(walk, len(texts[group]), beam, vocabulary)
    return found


def _grow_walk(walk: Walk, num_texts: int, beam: Beam, vocabulary: Tensor | None) -> list[TextTrees]:
    parts: list[list[TextTrees]] = [[] for _ in range(num_texts)]
    for blocks in walk.rounds():
        logits = walk.read(blocks)
        rooted = [(block, rows) for block, rows in zip(blocks, logits, strict=True) if block.roots]
        if not rooted:
            continue
        trees = _grow_round(walk, rooted, beam, vocabulary)
        sizes = [len(block.roots) for block, _ in rooted]
        split = zip(*(torch.split(part, sizes) for part in trees), strict=True)
        for (block, _), own in zip(rooted, split, strict=True):
            parts[block.text].append(TextTrees(*own))
    return [TextTrees(*map(torch.cat, zip(*own, strict=True))) if own else no_trees(beam) for own in parts]


def _grow_round(walk: Walk, rooted: Sequence[tuple[Block, Tensor]], beam: Beam, vocabulary: Tensor | None) -> TextTrees:
    """Grow the trees at all M roots of the blocks."""
    blocks = [block for block, _ in rooted]
    rows = torch.cat([logits[[root - block.start for root in block.roots]] for block, logits in rooted])  # [M, V]
    labels, children = read_labels(rows, vocabulary, beam.num_kept, beam.width)
    all_labels = [Labels(*(part[:, None] for part in labels))]  # [M, 1, K]
    tokens, parents, values = select_best(children, torch.zeros_like(children.log_probs[:, :1]), beam.width)
    frontier = Frontier.of(blocks)
    levels: list[tuple[Tensor, Tensor]] = []
    for _ in range(beam.depth - 1):
        levels.append((tokens, parents))
        rows = torch.cat(walk.hang(blocks, frontier.hang(tokens, parents)))  # [M*k, V]
        labels, children = read_labels(rows, vocabulary, beam.num_kept, beam.width)
        all_labels.append(Labels(*(by_root(part, beam.width) for part in labels)))  # [M, k, K]
        tokens, parents, values = select_best(children, values, beam.width)
    return packed(torch.tensor([root for block in blocks for root in block.roots]), levels, all_labels, beam.width)


class Frontier:
    """Positions of the last level's nodes in the pending trees of their blocks."""

    def __init__(self, sizes: Sequence[int], written: Sequence[int], places: Tensor) -> None:
        self._sizes = list(sizes)  # trees per block
        self._written = list(written)  # written nodes per block
        self._places = places  # [M, 1 or k]

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> Self:
        """Start at the roots."""
        places = torch.tensor([[root - block.start] for block in blocks for root in block.roots])
        return cls([len(block.roots) for block in blocks], [block.end - block.start for block in blocks], places)

    def hang(self, tokens: Tensor, parents: Tensor) -> list[Nodes]:
        """Return the nodes of the next level [M, k] per block."""
        above = self._places.gather(1, parents.cpu())
        width = tokens.shape[1]
        first = torch.cat(
            [start + width * torch.arange(size) for start, size in zip(self._written, self._sizes, strict=True)]
        )  # [M]
        self._places = first[:, None] + torch.arange(width)
        self._written = [start + width * size for start, size in zip(self._written, self._sizes, strict=True)]
        by_block = (torch.split(rows, self._sizes) for rows in (tokens.cpu(), above))
        return [Nodes(own.flatten().tolist(), up.flatten().tolist()) for own, up in zip(*by_block, strict=True)]
