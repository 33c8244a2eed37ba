"""Draft trees and a target that does not lend its layers: it runs them along the texts, pass by pass (`walk.py`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.targets import Target
from draftwood.train.trees.merge import MergedTrees
from draftwood.train.trees.walk import Block, Load, Nodes, Texts, Walk, together, walking

MOST_TEXTS = 4  # that are walked through together: their trees are large


class RootTree(NamedTuple):
    """The nodes below one root; of these the root is number 0, and not there."""

    tokens: list[int]
    parents: list[int]


class Said(NamedTuple):
    """What the target says about trees of one text, where it belongs among all [R, M] nodes of that text."""

    text: int
    below: list[int]  # [n] the nodes below roots
    probs: Tensor  # [n]
    roots: list[int]  # [r]
    choices: Tensor  # [r + n] behind the roots, then behind what is below them


def verify_walking(
    target: Target, texts: Texts, roots: Texts, merged: MergedTrees, probs: Tensor, choices: Tensor
) -> None:
    """Writes what the target says into ``probs`` and ``choices [B, R, M]``."""
    trees = _on_host(roots, merged)
    most = max([1, *(len(tree.tokens) for own in trees for tree in own)])
    load = Load(branching=most, total=most)
    for group in together(target, texts, load, MOST_TEXTS):
        with walking(target, texts[group], roots[group], load) as walk:
            for said in _verify_along(walk, trees[group], probs.shape[2]):
                text = group.start + said.text
                below, all_nodes = (
                    torch.tensor(each, dtype=torch.int64, device=probs.device)
                    for each in (said.below, said.roots + said.below)
                )
                probs[text].view(-1).index_copy_(0, below, said.probs)
                choices[text].view(-1).index_copy_(0, all_nodes, said.choices)


def _on_host(roots: Texts, merged: MergedTrees) -> list[list[RootTree]]:
    """By text and root."""
    tokens, parents = merged.tokens.tolist(), merged.parents.tolist()
    sizes = merged.is_node.sum(dim=2).tolist()
    return [
        [RootTree(*(each[text][root][1 : sizes[text][root]] for each in (tokens, parents))) for root in range(len(own))]
        for text, own in enumerate(roots)
    ]


def _verify_along(walk: Walk, trees: Sequence[Sequence[RootTree]], width: int) -> Iterator[Said]:
    """Trees have ``width`` places each in what is written."""
    waiting = [iter(enumerate(own)) for own in trees]
    for blocks in walk.rounds():
        own = [list(islice(waiting[block.text], len(block.roots))) for block in blocks]
        hung = [_hung(block, [tree for _, tree in each]) for block, each in zip(blocks, own, strict=True)]
        all_logits = walk.read(blocks, hung)
        for block, numbered, nodes, logits in zip(blocks, own, hung, all_logits, strict=True):
            if block.roots:
                roots = [number * width for number, _ in numbered]
                sizes = [len(tree.tokens) for _, tree in numbered]
                below = [root + 1 + node for root, size in zip(roots, sizes, strict=True) for node in range(size)]
                yield Said(block.text, below, _probs(logits, nodes), roots, _choices(logits, block))


def _hung(block: Block, trees: Sequence[RootTree]) -> Nodes:
    """The trees below the roots of a block, side by side."""
    tokens: list[int] = []
    parents: list[int] = []
    for root, tree in zip(block.roots, trees, strict=True):
        before = block.end - block.start + len(tokens) - 1
        tokens += tree.tokens
        parents += [before + parent if parent else root - block.start for parent in tree.parents]
    return Nodes(tokens, parents)


def _probs(logits: Tensor, nodes: Nodes) -> Tensor:
    """Of the nodes that hang off a block, from the logits of all its rows; those of its chain come first."""
    parents, tokens = (torch.tensor(each, dtype=torch.int64, device=logits.device) for each in nodes[::-1])
    total = logits.logsumexp(dim=-1)  # [rows]
    return (logits[parents, tokens] - total[parents]).exp()


def _choices(logits: Tensor, block: Block) -> Tensor:
    """Behind the roots of a block, then behind what hangs off it."""
    rows = [root - block.start for root in block.roots] + list(range(block.end - block.start, len(logits)))
    return logits.argmax(dim=-1)[rows]
