"""Verify draft trees at positions of texts with the target.

The trees of several heads at the same root are merged, since they share most nodes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.targets import Layers, Target
from draftwood.train.trees.attention import ancestors_of
from draftwood.train.trees.draft_trees import DraftTrees
from draftwood.train.trees.layer_run import Slice, as_target, slices, split_blocks
from draftwood.train.trees.merge import MergedTrees, merge
from draftwood.train.trees.verify_walk import verify_by_passes
from draftwood.train.trees.walk import Texts

NO_CHOICE = -2  # neither a token id nor -1, the root


class VerifiedTree(NamedTuple):
    """Results per node [B, R, N]; 1 and `NO_CHOICE` at padding."""

    probs: Tensor  # [B, R, N] float32: the target's probability of the token after its parent; 1 at the root
    choices: Tensor  # [B, R, N] int64: the target's greedy choice after the node


def verify_trees(target: Target, texts: Texts, roots: Texts, trees: Sequence[DraftTrees]) -> list[VerifiedTree]:
    """Verify each of ``trees``, which have the same roots."""
    merged = merge(trees)
    shape, device = merged.tokens.shape, merged.tokens.device
    results = VerifiedTree(torch.ones(shape, device=device), torch.full(shape, NO_CHOICE, device=device))
    layers = target.layers()
    with as_target(target):
        if layers is None:
            verify_by_passes(target, texts, roots, merged, *results)
        else:
            for each in slices(layers, texts, roots, max(1, shape[2] - 1)):
                _verify_slice(layers, each, merged, results)
    return [VerifiedTree(*(each.gather(2, own) for each in results)) for own in merged.numbers]


def _verify_slice(layers: Layers, those: Slice, merged: MergedTrees, results: VerifiedTree) -> None:
    """Verify the trees of a slice and write the results into ``results``."""
    first, end = those.first, those.first + those.roots.shape[1]
    group = torch.tensor(those.texts, device=merged.tokens.device)
    tokens, parents, is_node = (each[group, first:end] for each in merged[:3])  # [b, R, M]
    is_node = is_node & those.is_root[..., None]
    ancestors = ancestors_of(parents, merged.height)[..., 1:, 1:]
    below = those.run.step(tokens[..., 1:], ancestors, is_node[..., 1:])  # [n, H]
    states = torch.cat([those.run.at_roots[those.is_root], below])
    order = _number_rows(is_node)  # [b, R, M]
    places = torch.arange(results.probs.numel(), device=group.device).view_as(results.probs)[group, first:end]
    parents = order.gather(2, parents)
    where = is_node[..., 1:].flatten().nonzero()[:, 0]  # [n]
    tokens, parents, own = (each[..., 1:].flatten()[where] for each in (tokens, parents, places))
    probs, choices = _read_logits(layers, states, parents, tokens)
    results.probs.view(-1).index_copy_(0, own, probs)
    results.choices.view(-1).index_copy_(0, torch.cat([places[..., 0][those.is_root], own]), choices)


def _number_rows(is_node: Tensor) -> Tensor:
    """Return the row of each node [b, R, M]: all roots first, then all other nodes."""
    is_root = is_node[..., :1]
    roots = is_root.flatten().cumsum(0).view_as(is_root) - 1
    below = is_node[..., 1:].flatten().cumsum(0).view_as(is_node[..., 1:]) - 1
    return torch.cat([roots, below + is_root.sum()], dim=2)


def _read_logits(layers: Layers, states: Tensor, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities of ``tokens [n]`` after rows ``parents [n]`` of states [N, H], and all choices [N]."""
    log_probs = torch.zeros(len(tokens), device=states.device)
    choices = []
    first = 0
    for block in split_blocks(states, layers.config.vocab_size):
        found = layers.logits(block).log_softmax(dim=-1)
        choices.append(found.argmax(dim=-1))
        own = parents - first
        is_here = (own >= 0) & (own < len(block))
        log_probs = torch.where(is_here, found[own.clamp(0, len(block) - 1), tokens], log_probs)
        first += len(block)
    return log_probs.exp(), torch.cat(choices)
