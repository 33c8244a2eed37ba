"""Draft trees of a head below many positions at once: the beam of decoding (`growth.neural_ranked.BeamGrowth`) over
tensors, so that thousands of trees take as many passes as one.

Of every depth the best k nodes are expanded, each into its best k children; the tree is the best of all, the root
among them. What a node is worth is the product of the probabilities on its path, so parents come before children.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.train.trees.head_run import DraftHead, HeadRun

ROWS = 4096  # whose logits are held at once


class DraftBeam(NamedTuple):
    """How trees grow; as in decoding, ``nodes`` includes the root."""

    width: int = 10
    nodes: int = 60
    depth: int = 7


class DraftTrees(NamedTuple):
    """Trees of N nodes, whose node 0 is the root, for B texts with R roots each. Parents come before children."""

    tokens: Tensor  # [B, R, N] int64, tokens of the target; of the root -1
    parents: Tensor  # [B, R, N] int64; of the root 0, itself
    depths: Tensor  # [B, R, N] int64


@torch.no_grad()
def grow_draft_trees(head: DraftHead, run: HeadRun, beam: DraftBeam) -> DraftTrees:
    """Below the roots of a run that has not left them."""
    width = min(beam.width, head.config.draft_vocab_size)
    hidden = run.at_roots()  # [B, R, 1, H]
    values = torch.zeros(hidden.shape[:3], device=hidden.device)  # [B, R, frontier]
    numbers = torch.full_like(values, -1, dtype=torch.int64)  # of the frontier, among all candidates; the root is -1
    found: list[tuple[Tensor, Tensor, Tensor]] = []  # by depth: tokens, values, parents [B, R, frontier * width]
    for depth in range(1, beam.depth + 1):
        tokens, log_probs = _best_children(head, hidden, width)  # [B, R, frontier, width]
        level = (
            tokens.flatten(2),
            (values[..., None] + log_probs).flatten(2),
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


def _best_children(head: DraftHead, hidden: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The best tokens of the target behind ``hidden [B, R, k, H]``, and their log-probabilities: [B, R, k, width]."""
    tokens, values = [], []
    for rows in torch.split(hidden.flatten(0, 2), ROWS):
        logits = head.logits(rows)  # [n, Vd]
        best = logits.topk(width)
        tokens.append(head.target_ids(best.indices))
        values.append(best.values - logits.logsumexp(dim=-1, keepdim=True))
    shape = (*hidden.shape[:3], width)
    return torch.cat(tokens).view(shape), torch.cat(values).view(shape)


def _best_nodes(found: list[tuple[Tensor, Tensor, Tensor]], num_nodes: int) -> DraftTrees:
    """The best of all candidates, and the root before them. Equals stay in their order, so parents come first."""
    tokens, values, parents = (torch.cat(each, dim=2) for each in zip(*found, strict=True))  # [B, R, C]
    of_depths = [torch.full_like(each[0], depth) for depth, each in enumerate(found, start=1)]
    order = values.sort(dim=-1, descending=True, stable=True).indices
    numbers = torch.arange(order.shape[2], device=order.device).expand_as(order)
    ranks = torch.empty_like(order).scatter_(2, order, numbers)
    chosen = order[..., : num_nodes - 1]
    above = parents.gather(2, chosen)
    above = torch.where(above < 0, 0, 1 + ranks.gather(2, above.clamp(min=0)))
    return DraftTrees(
        _behind(-1, tokens.gather(2, chosen)),
        _behind(0, above),
        _behind(0, torch.cat(of_depths, dim=2).gather(2, chosen)),
    )


def _behind(first: int, rest: Tensor) -> Tensor:
    return torch.cat([torch.full_like(rest[..., :1], first), rest], dim=-1)
