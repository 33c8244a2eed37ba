"""Sources that have to be run: what a small model or a draft head says after the nodes of growing trees.

A draft model keeps sequences as a target does: a committed text, and behind it a pending tree that grows from pass to
pass. The tree's first nodes have no parent among its nodes: they follow the last token of the text. One pass serves the
trees of many requests. What follows the nodes asked for comes back as the best few tokens of each, in the target's
vocabulary.

Heads read hidden states of the target. A node of the *text* comes with those of the token before it (``features``);
nodes of a draft below it are given the model's own guess at them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draftwood.targets import Segment, TopRows


class DraftSegment(NamedTuple):
    """What one request contributes to a draft pass."""

    segment: Segment
    features: torch.Tensor | None = None  # [n, T*H] the target's taps before each node; None: below nodes that ran


class DraftModel(ABC):
    """Runs packed trees of several sequences, as a target does, for drafting."""

    taps: tuple[int, ...] = ()  # the hidden states of the target that text nodes must come with
    max_positions: int  # positions that a sequence can have
    max_depth: int | None = None  # the last level that it can say anything about; None: there is none
    keeps_drafts: bool = True  # whether what it computed for accepted nodes is as good as if they had been text

    @abstractmethod
    def open(self, capacity: int) -> int | None:
        """Room for a sequence of so many positions, tree nodes included; None if there is none."""

    @abstractmethod
    def close(self, sequence: int) -> None: ...

    @abstractmethod
    def forward(self, segments: Sequence[DraftSegment], k: int) -> TopRows:
        """One pass. The k best tokens after each of the nodes that ``num_logits`` ask for, in order."""

    @abstractmethod
    def keep(self, sequence: int, nodes: Sequence[int]) -> None:
        """Commits a path of the pending tree; forgets the other nodes."""
