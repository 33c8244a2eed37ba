"""The target along texts, block by block, with trees that hang off the positions of a block.

Roots of one text have different prefixes, which are all prefixes of that text. So a block of the text is a chain in the
pending tree, its roots are nodes of that chain, and their trees are branches of it: the pass that runs the chain or a
depth of the trees runs it for all roots of a block, and of several texts. Then the chain is kept, its branches are
forgotten, and the next block begins. Every token of a text goes through the target once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.targets import Segment, Target, chain_parents

PASS_ROWS = 1024  # nodes of a pass, about: the largest that GPUs run as a captured graph
LONG_CHAIN = 1024  # positions without roots that are read at once


class Block(NamedTuple):
    """A stretch of a text, and the roots in it."""

    text: int
    start: int
    end: int
    roots: Sequence[int]  # positions, ascending


class Nodes(NamedTuple):
    """What hangs off a block. Parents are numbers of its pending tree, whose node i is position start + i at first."""

    tokens: Sequence[int]
    parents: Sequence[int]


NOTHING = Nodes((), ())

Texts = Sequence[Sequence[int]]


class Load(NamedTuple):
    """How many nodes hang off a root: in one pass, and in all passes until its block is done."""

    branching: int
    total: int


class Walk:
    """Through ``texts``, to the last root of each: see `walking`."""

    def __init__(self, target: Target, texts: Texts, roots: Texts, load: Load) -> None:
        self._target = target
        self._texts = texts
        share = PASS_ROWS // max(1, len(texts))
        # A GPU's pass has rows for all nodes of a pending tree, also for those that earlier passes have written.
        num_positions = max(1, min(share, PASS_ROWS // 4))
        num_roots = min(share // load.branching, (PASS_ROWS - num_positions) // load.total)
        longest = max((own[-1] + 1 for own in roots if own), default=0)
        fitting = (target.num_slots // max(1, len(texts)) - longest) // load.total  # beside the text in the cache
        num_roots = max(1, min(num_roots, fitting))
        self._blocks = [_blocks(text, own, num_roots, num_positions) for text, own in enumerate(roots)]
        self._room = load.total * max((len(block.roots) for own in self._blocks for block in own), default=0)
        self._sequences: list[int] = []
        self._pending: dict[int, int] = {}  # by text: nodes that are written behind what is kept

    def open(self) -> None:
        for text, blocks in zip(self._texts, self._blocks, strict=True):
            end = blocks[-1].end if blocks else 0
            assert end <= len(text)
            self._sequences.append(self._target.open(max(end + self._room, 1)))
        self._target.set_top(0)
        self._target.set_taps(())

    def close(self) -> None:
        while self._sequences:
            self._target.close(self._sequences.pop())

    def rounds(self) -> Iterator[list[Block]]:
        """The blocks that go together, one of each text that is not done; what was hung off them is forgotten then."""
        for number in range(max(map(len, self._blocks), default=0)):
            current = [blocks[number] for blocks in self._blocks if number < len(blocks)]
            yield current
            for block in current:
                self._target.keep(self._sequences[block.text], range(block.end - block.start))
            self._pending.clear()

    def read(self, blocks: Sequence[Block], below: Sequence[Nodes] | None = None) -> list[Tensor]:
        """Runs the chains of blocks, and what hangs off them: of each the logits ``[n, V]`` of all its nodes, none for
        a block without roots. They are the target's memory until its next pass."""
        segments = []
        for block, (tokens, parents) in zip(blocks, below or [NOTHING] * len(blocks), strict=True):
            size = block.end - block.start
            token_ids = [*self._texts[block.text][block.start : block.end], *tokens]
            wanted = len(token_ids) if block.roots else 0
            sequence = self._sequences[block.text]
            segments.append(Segment(sequence, token_ids, [*chain_parents(size), *parents], wanted))
            self._pending[block.text] = len(token_ids)
        return [output.logits for output in self._target.forward(segments).split(segments)]

    def hang(self, blocks: Sequence[Block], below: Sequence[Nodes]) -> list[Tensor]:
        """Runs further nodes below blocks that were read, as ``read`` does."""
        segments = []
        for block, (tokens, parents) in zip(blocks, below, strict=True):
            after = self._pending[block.text]
            segments.append(Segment(self._sequences[block.text], tokens, parents, len(tokens), after))
            self._pending[block.text] = after + len(tokens)
        return [output.logits for output in self._target.forward(segments).split(segments)]


@contextmanager
def walking(target: Target, texts: Texts, roots: Texts, load: Load) -> Iterator[Walk]:
    """A walk, and an end to it. The target computes as it always does, whatever precision a head is trained in."""
    walk = Walk(target, texts, roots, load)
    with torch.autocast(target.info.device.type, enabled=False):
        try:
            walk.open()
            yield walk
        finally:
            walk.close()


def together(target: Target, texts: Texts, load: Load, most: int) -> Iterator[slice]:
    """Texts that go together, at most so many and as many as the cache holds with what hangs off them."""
    room = target.num_slots - PASS_ROWS * load.total // load.branching
    first = used = 0
    for text, tokens in enumerate(texts):
        needed = len(tokens) + load.total
        if text > first and (used + needed > room or text - first == most):
            yield slice(first, text)
            first, used = text, 0
        used += needed
    yield slice(first, len(texts))


def _blocks(text: int, roots: Sequence[int], most_roots: int, most_positions: int) -> list[Block]:
    found: list[Block] = []
    start = number = 0
    while number < len(roots):
        gap = roots[number] - start
        if gap >= most_positions:
            end = start + min(gap, LONG_CHAIN)
            found.append(Block(text, start, end, ()))
        else:
            own = [root for root in roots[number : number + most_roots] if root < start + most_positions]
            end = own[-1] + 1
            found.append(Block(text, start, end, own))
            number += len(own)
        start = end
    return found
