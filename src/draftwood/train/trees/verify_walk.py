"""Verify draft trees with ordinary forward passes (`walk.py`), for targets that do not expose their layers."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.targets import Target
from draftwood.train.trees.merge import MergedTrees
from draftwood.train.trees.walk import Block, Load, Nodes, Texts, Walk, group_texts, walking

MAX_TEXTS = 4  # texts that run at once; few, since draft trees are large


class RootTree(NamedTuple):
    """The nodes of one tree without its root, which has number 0."""

    tokens: list[int]
    parents: list[int]


class BlockResults(NamedTuple):
    """Results for trees of one text, with their indices among all [R, M] nodes of that text."""

    text: int
    below: list[int]  # [n] nodes that are not roots
    probs: Tensor  # [n]
    roots: list[int]  # [r]
    choices: Tensor  # [r + n] after the roots, then after the other nodes


def verify_by_passes(
    target: Target, texts: Texts, roots: Texts, merged: MergedTrees, probs: Tensor, choices: Tensor
) -> None:
    """Write the results into ``probs`` and ``choices [B, R, M]``."""
    trees = _to_lists(roots, merged)
    most = max([1, *(len(tree.tokens) for own in trees for tree in own)])
    load = Load(branching=most, total=most)
    for group in group_texts(target, texts, load, MAX_TEXTS):
        with walking(target, texts[group], roots[group], load) as walk:
            for results in _verify_walk(walk, trees[group], probs.shape[2]):
                text = group.start + results.text
                below, all_nodes = (
                    torch.tensor(each, dtype=torch.int64, device=probs.device)
                    for each in (results.below, results.roots + results.below)
                )
                probs[text].view(-1).index_copy_(0, below, results.probs)
                choices[text].view(-1).index_copy_(0, all_nodes, results.choices)


def _to_lists(roots: Texts, merged: MergedTrees) -> list[list[RootTree]]:
    """Return the trees by text and root as lists."""
    tokens, parents = merged.tokens.tolist(), merged.parents.tolist()
    sizes = merged.is_node.sum(dim=2).tolist()
    return [
        [RootTree(*(each[text][root][1 : sizes[text][root]] for each in (tokens, parents))) for root in range(len(own))]
        for text, own in enumerate(roots)
    ]


def _verify_walk(walk: Walk, trees: Sequence[Sequence[RootTree]], width: int) -> Iterator[BlockResults]:
    """Run the walk and yield results. Each tree has ``width`` nodes in the output."""
    waiting = [iter(enumerate(own)) for own in trees]
    for blocks in walk.rounds():
        own = [list(islice(waiting[block.text], len(block.roots))) for block in blocks]
        hung = [_collect_nodes(block, [tree for _, tree in each]) for block, each in zip(blocks, own, strict=True)]
        all_logits = walk.read(blocks, hung)
        for block, numbered, nodes, logits in zip(blocks, own, hung, all_logits, strict=True):
            if block.roots:
                roots = [number * width for number, _ in numbered]
                sizes = [len(tree.tokens) for _, tree in numbered]
                below = [root + 1 + node for root, size in zip(roots, sizes, strict=True) for node in range(size)]
                yield BlockResults(block.text, below, _probs(logits, nodes), roots, _choices(logits, block))


def _collect_nodes(block: Block, trees: Sequence[RootTree]) -> Nodes:
    """Return the nodes of all trees of a block."""
    tokens: list[int] = []
    parents: list[int] = []
    for root, tree in zip(block.roots, trees, strict=True):
        before = block.end - block.start + len(tokens) - 1
        tokens += tree.tokens
        parents += [before + parent if parent else root - block.start for parent in tree.parents]
    return Nodes(tokens, parents)


def _probs(logits: Tensor, nodes: Nodes) -> Tensor:
    """Return the probabilities of the nodes from the logits of all rows of a block, the chain first."""
    parents, tokens = (torch.tensor(each, dtype=torch.int64, device=logits.device) for each in nodes[::-1])
    total = logits.logsumexp(dim=-1)  # [rows]
    return (logits[parents, tokens] - total[parents]).exp()


def _choices(logits: Tensor, block: Block) -> Tensor:
    """Return the greedy choices after the roots of a block, then after its nodes."""
    rows = [root - block.start for root in block.roots] + list(range(block.end - block.start, len(logits)))
    return logits.argmax(dim=-1)[rows]
