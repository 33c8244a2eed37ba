"""Run the target along texts, block by block, with trees at positions of a block.

The prefixes of all roots of a text are prefixes of that text. A block of the text is therefore a chain in the pending
tree, its roots are nodes of the chain, and their trees are branches. One pass runs the chain, or one depth of the
trees, for all roots of a block and for several texts. Then the chain is kept, the branches are dropped, and the next
block starts. Every token of a text runs through the target once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from draftwood.targets import Segment, Target, chain_parents

PASS_ROWS = 1024  # approximate nodes per pass: the largest captured graph on GPUs
LONG_CHAIN = 1024  # positions without roots that run at once


class Block(NamedTuple):
    """A range of a text and the roots in it."""

    text: int
    start: int
    end: int
    roots: Sequence[int]  # positions, ascending


class Nodes(NamedTuple):
    """Tree nodes of a block. Parents are nodes of its pending tree, whose node i is position start + i at first."""

    tokens: Sequence[int]
    parents: Sequence[int]


NOTHING = Nodes((), ())

Texts = Sequence[Sequence[int]]


class Load(NamedTuple):
    """Number of nodes per root: in one pass, and in all passes of its block."""

    branching: int
    total: int


class Walk:
    """A walk through ``texts`` up to the last root of each, see `walking`."""

    def __init__(self, target: Target, texts: Texts, roots: Texts, load: Load) -> None:
        self._target = target
        self._texts = texts
        share = PASS_ROWS // max(1, len(texts))
        # On a GPU a pass has rows for all nodes of a pending tree, including those of earlier passes.
        num_positions = max(1, min(share, PASS_ROWS // 4))
        num_roots = min(share // load.branching, (PASS_ROWS - num_positions) // load.total)
        longest = max((own[-1] + 1 for own in roots if own), default=0)
        fitting = (target.num_slots // max(1, len(texts)) - longest) // load.total  # besides the text in the cache
        num_roots = max(1, min(num_roots, fitting))
        self._blocks = [_blocks(text, own, num_roots, num_positions) for text, own in enumerate(roots)]
        self._room = load.total * max((len(block.roots) for own in self._blocks for block in own), default=0)
        self._sequences: list[int] = []
        self._pending: dict[int, int] = {}  # by text: pending nodes

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
        """Yield the blocks that run at once, one per unfinished text. Their branches are dropped afterwards."""
        for number in range(max(map(len, self._blocks), default=0)):
            current = [blocks[number] for blocks in self._blocks if number < len(blocks)]
            yield current
            for block in current:
                self._target.keep(self._sequences[block.text], range(block.end - block.start))
            self._pending.clear()

    def read(self, blocks: Sequence[Block], below: Sequence[Nodes] | None = None) -> list[Tensor]:
        """Run the chains of blocks with their tree nodes. Return the logits ``[n, V]`` per block, none without roots.

        Logits are valid until the target's next pass."""
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
        """Run further tree nodes of blocks that were read. Return their logits."""
        segments = []
        for block, (tokens, parents) in zip(blocks, below, strict=True):
            after = self._pending[block.text]
            segments.append(Segment(self._sequences[block.text], tokens, parents, len(tokens), after))
            self._pending[block.text] = after + len(tokens)
        return [output.logits for output in self._target.forward(segments).split(segments)]


@contextmanager
def walking(target: Target, texts: Texts, roots: Texts, load: Load) -> Iterator[Walk]:
    """Open a walk for the block. The target runs in its own precision, whatever the head is trained in."""
    walk = Walk(target, texts, roots, load)
    with torch.autocast(target.info.device.type, enabled=False):
        try:
            walk.open()
            yield walk
        finally:
            walk.close()


def group_texts(target: Target, texts: Texts, load: Load, max_texts: int) -> Iterator[slice]:
    """Yield groups of at most ``max_texts`` texts that fit into the cache with their tree nodes."""
    room = target.num_slots - PASS_ROWS * load.total // load.branching
    first = used = 0
    for text, tokens in enumerate(texts):
        needed = len(tokens) + load.total
        if text > first and (used + needed > room or text - first == max_texts):
            yield slice(first, text)
            first, used = text, 0
        used += needed
    yield slice(first, len(texts))


def _blocks(text: int, roots: Sequence[int], max_roots: int, max_positions: int) -> list[Block]:
    found: list[Block] = []
    start = number = 0
    while number < len(roots):
        gap = roots[number] - start
        if gap >= max_positions:
            end = start + min(gap, LONG_CHAIN)
            found.append(Block(text, start, end, ()))
        else:
            own = [root for root in roots[number : number + max_roots] if root < start + max_positions]
            end = own[-1] + 1
            found.append(Block(text, start, end, own))
            number += len(own)
        start = end
    return found
