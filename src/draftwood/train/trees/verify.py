"""What the target says about draft trees below positions of texts: one look at every node, whoever drafted it.

The trees of several heads below the same root are merged, since they have most nodes in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.targets import Layers, Target
from draftwood.train.trees.attention import ancestors_of
from draftwood.train.trees.draft_trees import DraftTrees
from draftwood.train.trees.layer_run import Slice, as_target, blocks_of, slices
from draftwood.train.trees.merge import MergedTrees, merge
from draftwood.train.trees.verify_walk import verify_walking
from draftwood.train.trees.walk import Texts

NO_CHOICE = -2  # no token, nor that of a root


class Verified(NamedTuple):
    """Of the nodes of trees [B, R, N]; where a text has fewer roots, 1 and no choice."""

    probs: Tensor  # [B, R, N] float32: the target's probability of the node's token behind its parent; of the root 1
    choices: Tensor  # [B, R, N] int64: what the target would say behind the node


def verify_trees(target: Target, texts: Texts, roots: Texts, trees: Sequence[DraftTrees]) -> list[Verified]:
    """Of each of ``trees``, which hang off the same roots: those of text b are its first ones."""
    merged = merge(trees)
    shape, device = merged.tokens.shape, merged.tokens.device
    said = Verified(torch.ones(shape, device=device), torch.full(shape, NO_CHOICE, device=device))
    layers = target.layers()
    with as_target(target):
        if layers is None:
            verify_walking(target, texts, roots, merged, *said)
        else:
            for each in slices(layers, texts, roots, max(1, shape[2] - 1)):
                _verify_slice(layers, each, merged, said)
    return [Verified(*(each.gather(2, own) for each in said)) for own in merged.numbers]


def _verify_slice(layers: Layers, those: Slice, merged: MergedTrees, said: Verified) -> None:
    """Writes what is said about the trees below some roots, b x R."""
    first, end = those.first, those.first + those.roots.shape[1]
    group = torch.tensor(those.texts, device=merged.tokens.device)
    tokens, parents, is_node = (each[group, first:end] for each in merged[:3])  # [b, R, M]
    is_node = is_node & those.is_root[..., None]
    ancestors = ancestors_of(parents, merged.height)[..., 1:, 1:]
    below = those.run.step(tokens[..., 1:], ancestors, is_node[..., 1:])  # [n, H]
    states = torch.cat([those.run.at_roots[those.is_root], below])
    order = _order(is_node)  # [b, R, M]
    places = torch.arange(said.probs.numel(), device=group.device).view_as(said.probs)[group, first:end]
    parents = order.gather(2, parents)
    where = is_node[..., 1:].flatten().nonzero()[:, 0]  # [n]
    tokens, parents, own = (each[..., 1:].flatten()[where] for each in (tokens, parents, places))
    probs, choices = _judged(layers, states, parents, tokens)
    said.probs.view(-1).index_copy_(0, own, probs)
    said.choices.view(-1).index_copy_(0, torch.cat([places[..., 0][those.is_root], own]), choices)


def _order(is_node: Tensor) -> Tensor:
    """The rows of nodes [b, R, M]: first all roots, then all that hang off them."""
    is_root = is_node[..., :1]
    roots = is_root.flatten().cumsum(0).view_as(is_root) - 1
    below = is_node[..., 1:].flatten().cumsum(0).view_as(is_node[..., 1:]) - 1
    return torch.cat([roots, below + is_root.sum()], dim=2)


def _judged(layers: Layers, states: Tensor, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """From last hidden states [N, H]: the probabilities of ``tokens [n]`` behind rows ``parents [n]``, and the choices
    behind all rows [N]."""
    log_probs = torch.zeros(len(tokens), device=states.device)
    choices = []
    first = 0
    for block in blocks_of(states, layers.config.vocab_size):
        found = layers.logits(block).log_softmax(dim=-1)
        choices.append(found.argmax(dim=-1))
        own = parents - first
        is_here = (own >= 0) & (own < len(block))
        log_probs = torch.where(is_here, found[own.clamp(0, len(block) - 1), tokens], log_probs)
        first += len(block)
    return log_probs.exp(), torch.cat(choices)
