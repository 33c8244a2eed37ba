"""The draft model interface: a small model or a draft head that predicts what follows the nodes of growing trees.

Like a target, a draft model holds sequences: a committed text followed by a pending tree that grows from pass to pass.
The first nodes of the tree have no parent node; they follow the last token of the text. One pass serves the trees of
many requests and returns the top tokens after the requested nodes, in the target's vocabulary.

Heads read hidden states of the target. A *text* node comes with those of the token before it (``features``); draft
nodes use the head's own prediction of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from draftwood.targets import DeviceAnswer, Found, SearchPlan, Segment, TopRows


class DraftSegment(NamedTuple):
    """The part of one request in a draft pass."""

    segment: Segment
    features: torch.Tensor | None = None  # [n, T*H] the target's taps before each node; None for draft nodes
    rows: Sequence[int] | None = None  # [n] of the features, if they are not as many as nodes and in their order

    def gather(self) -> torch.Tensor | None:
        """The features [n, T*H] of the nodes."""
        return None if self.features is None else gather_rows(self.features, self.rows)


def gather_rows(features: torch.Tensor, rows: Sequence[int] | None) -> torch.Tensor:
    """Some rows of features, in ascending order; None: all."""
    if rows is None or len(rows) == len(features):
        return features
    if rows and rows[-1] - rows[0] == len(rows) - 1:  # side by side, as in most paths
        return features[rows[0] : rows[-1] + 1]
    return features[torch.tensor(rows, dtype=torch.int64, device=features.device)]


# Waits for a search that was started ahead of its text. Given the text that there is now, it commits that and returns
# what was found below it; None, with nothing committed, if the search has read another text.
SearchAhead = Callable[[Sequence[int]], Found | None]


class DraftModel(ABC):
    """Runs packed trees of several sequences for drafting."""

    taps: tuple[int, ...] = ()  # layers of the target whose hidden states text nodes need
    max_positions: int  # maximum length of a sequence
    max_depth: int | None = None  # deepest level that it can predict; None: no limit
    keeps_drafts: bool = True  # whether cache entries of accepted draft nodes are as good as those of text
    searches: bool = False  # whether ``grow`` is there
    searches_ahead: bool = False  # whether ``start_ahead`` is there
    root_chunk: int = 512  # text tokens that the pass which a tree grows from may read; few, where graphs have sizes

    @property
    def num_prepared(self) -> int:
        """As in ``Target``."""
        return 0

    @abstractmethod
    def open(self, capacity: int) -> int | None:
        """Allocate a sequence of ``capacity`` positions, tree nodes included; None if there is no room."""

    @abstractmethod
    def close(self, sequence: int) -> None: ...

    @abstractmethod
    def forward(self, segments: Sequence[DraftSegment], k: int) -> TopRows:
        """Run one pass; return the top k tokens after the last ``num_logits`` nodes of each segment, in order."""

    def grow(self, segments: Sequence[DraftSegment], plan: SearchPlan) -> list[Found] | None:
        """Run a pass over text, and the passes of a search below it, without the host between them. Commits the text;
        if the model keeps drafts, the nodes of the search are then pending. None, with nothing committed, if the model
        cannot."""
        return None

    def start_ahead(self, answer: DeviceAnswer, sequence: int, plan: SearchPlan) -> SearchAhead | None:
        """Launch what ``grow`` would run next for this sequence, on the device that still verifies its tree: it reads
        the path that the target accepts there. Does not wait. None if the model cannot."""
        return None

    @abstractmethod
    def keep(self, sequence: int, nodes: Sequence[int]) -> None:
        """Commit a path of the pending tree; drop the other nodes."""
