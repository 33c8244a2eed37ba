"""Draft trees of a head at many positions at once: the beam of decoding (`growth.neural_ranked.BeamGrowth`) on
tensors, so that thousands of trees take as many passes as one.

At every depth the best k nodes are expanded into their best k children. The tree consists of the root and the best of
all nodes. The value of a node is the product of the probabilities on its path, so parents come before children.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.train.trees.head_run import DraftHead, HeadRun

ROWS = 4096  # rows whose logits are in memory at once


class DraftBeam(NamedTuple):
    """Size of the trees. ``nodes`` includes the root."""

    width: int = 10
    nodes: int = 60
    depth: int = 7


class DraftTrees(NamedTuple):
    """Trees of N nodes, whose node 0 is the root, for B texts with R roots each. Parents come before children."""

    tokens: Tensor  # [B, R, N] int64, target token ids; -1 at the root
    parents: Tensor  # [B, R, N] int64; 0 at the root
    depths: Tensor  # [B, R, N] int64


@torch.no_grad()
def grow_draft_trees(
    head: DraftHead, run: HeadRun, beam: DraftBeam, noise: torch.Generator | None = None
) -> DraftTrees:
    """Grow trees at the roots of a run that is still at its roots.

    ``noise``: add Gumbel noise to all log-probabilities, so that the children of a node are a draw without replacement.
    A node then ranks below its parent at least, whatever the noise, so that the tree is one."""
    width = min(beam.width, head.config.draft_vocab_size)
    hidden = run.at_roots()  # [B, R, 1, H]
    values = torch.zeros(hidden.shape[:3], device=hidden.device)  # [B, R, frontier]
    numbers = torch.full_like(values, -1, dtype=torch.int64)  # candidate numbers of the frontier; -1 for the root
    found: list[tuple[Tensor, Tensor, Tensor]] = []  # by depth: tokens, values, parents [B, R, frontier * width]
    for depth in range(1, beam.depth + 1):
        tokens, log_probs = _best_children(head, hidden, width, noise)  # [B, R, frontier, width]
        level = (
            tokens.flatten(2),
            torch.minimum(values[..., None], values[..., None] + log_probs).flatten(2),
            numbers[..., None].expand(tokens.shape).flatten(2),
        )
        found.append(level)
        if depth == beam.depth:
            break
        first = sum(each[0].shape[2] for each in found[:-1])
        values, places = (each[..., :width] for each in level[1].sort(dim=-1, descending=True, stable=True))
        numbers = first + places
        hidden = run.step(level[0].gather(2, places), places // width)
    return _best_nodes(found, beam.nodes)


def _best_children(head: DraftHead, hidden: Tensor, width: int, noise: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Return the top target tokens after ``hidden [B, R, k, H]`` and their log-probabilities: [B, R, k, width]."""
    tokens, values = [], []
    for rows in torch.split(hidden.flatten(0, 2), ROWS):
        logits = head.logits(rows)  # [n, Vd]
        total = logits.logsumexp(dim=-1, keepdim=True)
        if noise is not None:
            logits = logits - torch.empty_like(logits).exponential_(generator=noise).log()
        best = logits.topk(width)
        tokens.append(head.target_ids(best.indices))
        values.append(best.values - total)
    shape = (*hidden.shape[:3], width)
    return torch.cat(tokens).view(shape), torch.cat(values).view(shape)


def _best_nodes(found: list[tuple[Tensor, Tensor, Tensor]], num_nodes: int) -> DraftTrees:
    """Select the root and the best candidates. The sort is stable, so parents come first."""
    tokens, values, parents = (torch.cat(each, dim=2) for each in zip(*found, strict=True))  # [B, R, C]
    of_depths = [torch.full_like(each[0], depth) for depth, each in enumerate(found, start=1)]
    order = values.sort(dim=-1, descending=True, stable=True).indices
    numbers = torch.arange(order.shape[2], device=order.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(2, order, numbers)
    chosen = order[..., : num_nodes - 1]
    above = parents.gather(2, chosen)
    above = torch.where(above < 0, 0, 1 + ranks.gather(2, above.clamp(min=0)))
    return DraftTrees(
        _prepend(-1, tokens.gather(2, chosen)),
        _prepend(0, above),
        _prepend(0, torch.cat(of_depths, dim=2).gather(2, chosen)),
    )


def _prepend(first: int, rest: Tensor) -> Tensor:
    return torch.cat([torch.full_like(rest[..., :1], first), rest], dim=-1)
