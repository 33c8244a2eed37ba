"""Trees that the target grows below the positions of texts, and what it says behind every node of them.

A beam: the best k tokens behind the root, then of all children of the last depth's nodes the k with the largest path
probabilities. A tree of depth n has n rows of labels, that of the root among them: as many steps as a head takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.target.base import Target
from draftwood.train.trees.labels import Children, Labels, read_labels
from draftwood.train.trees.walk import Block, Load, Nodes, Texts, Walk, together, walking

MOST_TEXTS = 16  # whose trees grow together


class Beam(NamedTuple):
    """How trees grow."""

    width: int  # k
    depth: int  # steps of the head: the root, and depth - 1 rows of k nodes below it
    num_kept: int  # K of the labels


class TextTrees(NamedTuple):
    """The trees of one text, on the host: R roots, d = depth - 1 rows of k nodes below each, 1 + d * k labels."""

    roots: Tensor  # [R] int32
    tokens: Tensor  # [R, d, k] int32, tokens of the target
    parents: Tensor  # [R, d, k] int16, which of the row above
    ids: Tensor  # [R, 1 + d*k, K] int32, the head's ids
    probs: Tensor  # [R, 1 + d*k, K] float16
    rest: Tensor  # [R, 1 + d*k] float32
    counts: Tensor  # [R, 1 + d*k] bool

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self)


@torch.no_grad()
def grow_trees(
    target: Target, texts: Texts, roots: Texts, beam: Beam, vocabulary: Tensor | None = None
) -> list[TextTrees]:
    """The trees below ``roots`` of each text, which ascend; of tokens of the ``vocabulary``, if there is one."""
    size = target.info.vocab_size if vocabulary is None else len(vocabulary)
    beam = Beam(min(beam.width, size), beam.depth, min(beam.num_kept, size))
    load = Load(branching=beam.width, total=max(1, beam.width * (beam.depth - 1)))
    found: list[TextTrees] = []
    for group in together(target, texts, load, MOST_TEXTS):
        with walking(target, texts[group], roots[group], load) as walk:
            found += _grow_along(walk, len(texts[group]), beam, vocabulary)
    return found


def _grow_along(walk: Walk, num_texts: int, beam: Beam, vocabulary: Tensor | None) -> list[TextTrees]:
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
    return [TextTrees(*map(torch.cat, zip(*own, strict=True))) if own else _no_trees(beam) for own in parts]


def _grow_round(walk: Walk, rooted: Sequence[tuple[Block, Tensor]], beam: Beam, vocabulary: Tensor | None) -> TextTrees:
    """The trees below all roots of the blocks, M of them."""
    blocks = [block for block, _ in rooted]
    rows = torch.cat([logits[[root - block.start for root in block.roots]] for block, logits in rooted])  # [M, V]
    labels, children = read_labels(rows, vocabulary, beam.num_kept, beam.width)
    all_labels = [Labels(*(part[:, None] for part in labels))]  # [M, 1, K]
    tokens, parents, values = _best(children, torch.zeros_like(children.log_probs[:, :1]), beam.width)
    frontier = Frontier.of(blocks)
    levels: list[tuple[Tensor, Tensor]] = []
    for _ in range(beam.depth - 1):
        levels.append((tokens, parents))
        rows = torch.cat(walk.hang(blocks, frontier.hang(tokens, parents)))  # [M*k, V]
        labels, children = read_labels(rows, vocabulary, beam.num_kept, beam.width)
        all_labels.append(Labels(*(_by_root(part, beam.width) for part in labels)))  # [M, k, K]
        tokens, parents, values = _best(children, values, beam.width)
    return _packed([root for block in blocks for root in block.roots], levels, all_labels, beam.width)


def _by_root(rows: Tensor, num_nodes: int) -> Tensor:
    """[M, nodes, ...]"""
    return rows.view(-1, num_nodes, *rows.shape[1:])


def _best(children: Children, values: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the children [M*nodes, k] of nodes with ``values [M, nodes]`` the best: tokens, parents and values [M, k]."""
    tokens, log_probs = (_by_root(part, values.shape[1]) for part in children)
    best = (values[..., None] + log_probs).flatten(1).topk(width)
    return tokens.flatten(1).gather(1, best.indices), best.indices // tokens.shape[2], best.values


class Frontier:
    """Where the nodes of the last row stand in the pending trees of their blocks."""

    def __init__(self, sizes: Sequence[int], written: Sequence[int], places: Tensor) -> None:
        self._sizes = list(sizes)  # by block: its trees
        self._written = list(written)  # by block: nodes that are written
        self._places = places  # [M, 1 or k]

    @classmethod
    def of(cls, blocks: Sequence[Block]) -> Frontier:
        """The roots themselves."""
        places = torch.tensor([[root - block.start] for block in blocks for root in block.roots])
        return cls([len(block.roots) for block in blocks], [block.end - block.start for block in blocks], places)

    def hang(self, tokens: Tensor, parents: Tensor) -> list[Nodes]:
        """The next row [M, k] as what hangs off each block."""
        above = self._places.gather(1, parents.cpu())
        width = tokens.shape[1]
        first = torch.cat(
            [start + width * torch.arange(size) for start, size in zip(self._written, self._sizes, strict=True)]
        )  # [M]
        self._places = first[:, None] + torch.arange(width)
        self._written = [start + width * size for start, size in zip(self._written, self._sizes, strict=True)]
        by_block = (torch.split(rows, self._sizes) for rows in (tokens.cpu(), above))
        return [Nodes(own.flatten().tolist(), up.flatten().tolist()) for own, up in zip(*by_block, strict=True)]


def _packed(
    roots: Sequence[int], levels: Sequence[tuple[Tensor, Tensor]], labels: Sequence[Labels], width: int
) -> TextTrees:
    ids, probs, rest, counts = (torch.cat(parts, dim=1) for parts in zip(*labels, strict=True))
    none = torch.zeros(len(roots), 0, width, dtype=torch.int64)
    tokens, parents = (torch.stack(parts, dim=1) for parts in zip(*levels, strict=True)) if levels else (none, none)
    return TextTrees(
        torch.tensor(roots, dtype=torch.int32),
        tokens.to("cpu", torch.int32),
        parents.to("cpu", torch.int16),
        ids.to("cpu", torch.int32),
        probs.to("cpu", torch.float16),
        rest.to("cpu", torch.float32),
        counts.cpu(),
    )


def _no_trees(beam: Beam) -> TextTrees:
    labels = 1 + (beam.depth - 1) * beam.width
    roots, nodes = (torch.zeros(0, *shape, dtype=torch.int32) for shape in ((), (beam.depth - 1, beam.width)))
    ids, rest = torch.zeros(0, labels, beam.num_kept, dtype=torch.int32), torch.zeros(0, labels)
    return TextTrees(roots, nodes, nodes.to(torch.int16), ids, ids.to(torch.float16), rest, rest.bool())
