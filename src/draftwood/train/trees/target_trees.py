"""Trees that the target grew below the positions of texts, and what it said behind every node of them.

A beam: the best k tokens behind the root, then of all children of the last depth's nodes the k with the largest path
probabilities. A tree of depth n has n rows of labels, that of the root among them: as many steps as a head takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwood.train.trees.labels import Children, Labels


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


def by_root(rows: Tensor, num_nodes: int) -> Tensor:
    """[M, nodes, ...]"""
    return rows.view(-1, num_nodes, *rows.shape[1:])


def best_of(children: Children, values: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of the children [M*nodes, k] of nodes with ``values [M, nodes]`` the best: tokens, parents and values [M, k]."""
    tokens, log_probs = (by_root(part, values.shape[1]) for part in children)
    best = (values[..., None] + log_probs).flatten(1).topk(width)
    return tokens.flatten(1).gather(1, best.indices), best.indices // tokens.shape[2], best.values


def packed(roots: Tensor, levels: Sequence[tuple[Tensor, Tensor]], labels: Sequence[Labels], width: int) -> TextTrees:
    """Of M ``roots``, on the host: tokens and parents [M, k] of every row below them; labels of all rows."""
    ids, probs, rest, counts = (torch.cat(parts, dim=1) for parts in zip(*labels, strict=True))
    none = torch.zeros(len(roots), 0, width, dtype=torch.int64)
    tokens, parents = (torch.stack(parts, dim=1) for parts in zip(*levels, strict=True)) if levels else (none, none)
    return TextTrees(
        roots.to("cpu", torch.int32),
        tokens.to("cpu", torch.int32),
        parents.to("cpu", torch.int16),
        ids.to("cpu", torch.int32),
        probs.to("cpu", torch.float16),
        rest.to("cpu", torch.float32),
        counts.cpu(),
    )


def joined(parts: Sequence[TextTrees]) -> TextTrees:
    """One behind the other. By numpy: torch would wake a thread for every core, and wait for the last of them."""
    if len(parts) == 1:
        return parts[0]
    return TextTrees(*(torch.from_numpy(np.concatenate(each)) for each in zip(*parts, strict=True)))


def no_trees(beam: Beam) -> TextTrees:
    labels = 1 + (beam.depth - 1) * beam.width
    roots, nodes = (torch.zeros(0, *shape, dtype=torch.int32) for shape in ((), (beam.depth - 1, beam.width)))
    ids, rest = torch.zeros(0, labels, beam.num_kept, dtype=torch.int32), torch.zeros(0, labels)
    return TextTrees(roots, nodes, nodes.to(torch.int16), ids, ids.to(torch.float16), rest, rest.bool())
