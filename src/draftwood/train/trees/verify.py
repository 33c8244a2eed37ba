"""What the target says about draft trees below positions of texts: one look at every node, whoever drafted it.

The trees of several heads below the same root are merged, since they have most nodes in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwood.target.base import Target
from draftwood.train.trees.beam import DraftTrees
from draftwood.train.trees.walk import Block, Load, Nodes, Texts, Walk, together, walking

MOST_TEXTS = 4  # that are walked through together: their trees are large
NO_CHOICE = -2  # no token, nor that of a root

Ints = npt.NDArray[np.int64]


class Verified(NamedTuple):
    """Of the nodes of trees [B, R, N]; where a text has fewer roots, 1 and no choice."""

    probs: Tensor  # [B, R, N] float32: the target's probability of the node's token behind its parent; of the root 1
    choices: Tensor  # [B, R, N] int64: what the target would say behind the node


class Merged(NamedTuple):
    """The nodes of all trees below one root. Node 0 is the root."""

    tokens: list[int]
    parents: list[int]
    numbers: list[Ints]  # of each tree, [N]: which nodes are its own


class Said(NamedTuple):
    """What the target says about the nodes of one merged tree."""

    probs: npt.NDArray[np.float32]  # [n], as in Verified
    choices: Ints  # [n]


@torch.no_grad()
def verify_trees(target: Target, texts: Texts, roots: Texts, trees: Sequence[DraftTrees]) -> list[Verified]:
    """Of each of ``trees``, which hang off the same roots: those of text b are its first ones."""
    merged = _merge(roots, trees)
    shape = trees[0].tokens.shape
    probs = [np.ones(shape, np.float32) for _ in trees]
    choices = [np.full(shape, NO_CHOICE, np.int64) for _ in trees]
    most = max([1, *(len(tree.tokens) - 1 for own in merged for tree in own)])
    load = Load(branching=most, total=most)
    for group in together(target, texts, load, MOST_TEXTS):
        done = [0] * len(texts[group])
        with walking(target, texts[group], roots[group], load) as walk:
            found = list(_verify_along(walk, merged[group]))
        for text, said in found:
            where = group.start + text, done[text]
            done[text] += 1
            for number, nodes in enumerate(merged[where[0]][where[1]].numbers):
                probs[number][where] = said.probs[nodes]
                choices[number][where] = said.choices[nodes]
    device = trees[0].tokens.device
    both = zip(probs, choices, strict=True)
    return [Verified(*(torch.from_numpy(each).to(device) for each in own)) for own in both]


def _verify_along(walk: Walk, merged: Sequence[Sequence[Merged]]) -> Iterator[tuple[int, Said]]:
    """What is said about the trees of every text, in the order of its roots, and which text it is."""
    waiting = [iter(own) for own in merged]
    for blocks in walk.rounds():
        hung = [_hung(block, list(islice(waiting[block.text], len(block.roots)))) for block in blocks]
        all_logits = walk.read(blocks, [nodes for nodes, _ in hung])
        for block, (nodes, places), logits in zip(blocks, hung, all_logits, strict=True):
            if not block.roots:
                continue
            said = _said(logits, block.end - block.start, nodes)
            for at in places:
                probs = said.probs[at]
                probs[0] = 1.0
                yield block.text, Said(probs, said.choices[at])


def _merge(roots: Texts, trees: Sequence[DraftTrees]) -> list[list[Merged]]:
    """By text and root."""
    content = [(tree.tokens.tolist(), tree.parents.tolist()) for tree in trees]
    return [
        [merge([(tokens[text][root], parents[text][root]) for tokens, parents in content]) for root in range(len(own))]
        for text, own in enumerate(roots)
    ]


def merge(trees: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Merged:
    """Trees (tokens and parents, the root first) below one root as one."""
    known: dict[tuple[int, int], int] = {}
    all_tokens, all_parents = [-1], [-1]
    numbers: list[Ints] = []
    for number, (tokens, parents) in enumerate(trees):
        if number and (tokens, parents) == trees[number - 1]:
            numbers.append(numbers[-1])
            continue
        own = [0]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            place = own[parent], token
            if place not in known:
                known[place] = len(all_tokens)
                all_tokens.append(token)
                all_parents.append(own[parent])
            own.append(known[place])
        numbers.append(np.array(own))
    return Merged(all_tokens, all_parents, numbers)


def _hung(block: Block, trees: Sequence[Merged]) -> tuple[Nodes, list[Ints]]:
    """The trees below the roots of a block, side by side; and of each where its nodes stand in the pending tree."""
    tokens: list[int] = []
    parents: list[int] = []
    places: list[Ints] = []
    size = block.end - block.start
    for root, tree in zip(block.roots, trees, strict=True):
        first = size + len(tokens) - 1
        at = np.arange(first, first + len(tree.tokens))
        at[0] = root - block.start
        tokens += tree.tokens[1:]
        parents += at[tree.parents[1:]].tolist()
        places.append(at)
    return Nodes(tokens, parents), places


def _said(logits: Tensor, size: int, nodes: Nodes) -> Said:
    """About all rows of a block, whose chain has ``size``; nothing about the probabilities of the chain."""
    total = logits.logsumexp(dim=-1)  # [n]
    parents, tokens = (torch.tensor(each, dtype=torch.int64, device=logits.device) for each in nodes[::-1])
    probs = (logits[parents, tokens] - total[parents]).exp()
    return Said(np.append(np.ones(size, np.float32), probs.cpu().numpy()), logits.argmax(dim=-1).cpu().numpy())
