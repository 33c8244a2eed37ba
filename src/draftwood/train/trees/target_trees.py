"""Trees grown by the target at positions of texts, with its distributions after every node as labels.

They are grown by a beam: the top k tokens after the root, then the k children with the largest path probabilities. A
tree of depth n has n levels of labels including the root's: one per step of the head.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftwood.train.trees.labels import Children, Labels


class Beam(NamedTuple):
    """Size of the trees and labels."""

    width: int  # k
    depth: int  # steps of the head: the root, then depth - 1 levels of k nodes
    num_kept: int  # K: tokens per label


class TextTrees(NamedTuple):
    """Trees of one text on the CPU: R roots, each with d = depth - 1 levels of k nodes and 1 + d * k labels."""

    roots: Tensor  # [R] int32
    tokens: Tensor  # [R, d, k] int32, target token ids
    parents: Tensor  # [R, d, k] int16, index in the previous level
    ids: Tensor  # [R, 1 + d*k, K] int32, draft token ids
    probs: Tensor  # [R, 1 + d*k, K] float16
    rest: Tensor  # [R, 1 + d*k] float32
    counts: Tensor  # [R, 1 + d*k] bool

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self)


def by_root(rows: Tensor, num_nodes: int) -> Tensor:
    """Reshape rows to [M, nodes, ...]."""
    return rows.view(-1, num_nodes, *rows.shape[1:])


def select_best(children: Children, values: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Select the best children [M*nodes, k] of nodes with ``values [M, nodes]``: tokens, parents, values [M, k]."""
    tokens, log_probs = (by_root(part, values.shape[1]) for part in children)
    best = (values[..., None] + log_probs).flatten(1).topk(width)
    return tokens.flatten(1).gather(1, best.indices), best.indices // tokens.shape[2], best.values


def packed(roots: Tensor, levels: Sequence[tuple[Tensor, Tensor]], labels: Sequence[Labels], width: int) -> TextTrees:
    """Pack M ``roots``, the tokens and parents [M, k] of every level, and all labels, on the CPU."""
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
    """Concatenate trees. With numpy, since torch would start and join a thread per core."""
    if len(parts) == 1:
        return parts[0]
    return TextTrees(*(torch.from_numpy(np.concatenate(each)) for each in zip(*parts, strict=True)))


def no_trees(beam: Beam) -> TextTrees:
    labels = 1 + (beam.depth - 1) * beam.width
    roots, nodes = (torch.zeros(0, *shape, dtype=torch.int32) for shape in ((), (beam.depth - 1, beam.width)))
    ids, rest = torch.zeros(0, labels, beam.num_kept, dtype=torch.int32), torch.zeros(0, labels)
    return TextTrees(roots, nodes, nodes.to(torch.int16), ids, ids.to(torch.float16), rest, rest.bool())
