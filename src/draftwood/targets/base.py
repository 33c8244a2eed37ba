"""The contract of a target: the model whose output must not change.

A target owns *sequences*. Each has a committed prefix in the KV cache. One ``forward`` runs a packed batch: one
*segment* per sequence, packed into one row of N positions. A segment is a tree (or a chain) that continues the prefix
of its sequence. A forward commits nothing; ``keep`` commits the accepted nodes.

    sequence = target.open(capacity=512)
    target.forward([Segment(sequence, prompt, chain_parents(len(prompt)), num_logits=0)])
    target.keep(sequence, range(len(prompt)))              # a prompt is a chain; all of it is kept
    output = target.forward([Segment(sequence, tree.tokens, tree.parents, num_logits=len(tree))])
    target.keep(sequence, path)                            # accepted nodes, root first; the others are dropped
    target.close(sequence)

A tree may grow over several forwards. The nodes written for a sequence since its last ``keep`` are its *pending tree*.
A segment with ``after=n`` keeps the first n of them and adds its own nodes:

    target.forward([Segment(sequence, [root], [-1], num_logits=1)])
    target.forward([Segment(sequence, children, [0, 0, 0], num_logits=3, after=1)])        # nodes 1, 2 and 3
    target.forward([Segment(sequence, grandchildren, [1, 3], num_logits=2, after=4)])      # nodes 4 and 5
    target.keep(sequence, [0, 3, 5])
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from draftwood.errors import CapabilityError
from draftwood.models import ModelConfig
from draftwood.progress import Progress
from draftwood.targets.searches import Found, SearchPlan
from draftwood.targets.toprows import TopRows

DEFAULT_TOP_K = 10  # top entries of a row that drafters learn from by default


class Draw(NamedTuple):
    """How to draw a token after each node of a segment, from the distribution of ``sampling.Warper``."""

    rule: Sequence[float]  # temperature, top_k, top_p, min_p
    numbers: Callable[[], Sequence[float]]  # [num_logits] in [0, 1); a target on a GPU asks when the pass runs


class Segment(NamedTuple):
    """One sequence's part of a packed batch."""

    sequence: int
    token_ids: Sequence[int]  # [n]
    parents: Sequence[int]  # [n] indices in the whole tree, -1 for node 0; a node is at position prefix + depth
    num_logits: int  # compute logits for the last `num_logits` nodes: n for a tree, 0 or n for a prompt chunk
    after: int = 0  # number of nodes of the pending tree to keep; new nodes are numbered from there; 0: a new tree
    draw: Draw | None = None  # a target that cannot draw (`TargetInfo.can_draw`) ignores it


class ForwardOutput(NamedTuple):
    """The result of one packed forward. Rows follow the segments in order.

    A target may reuse the memory in its next forward: copy what must be kept.
    """

    logits: torch.Tensor  # [R, V] float32, R = sum of num_logits
    greedy_ids: torch.Tensor  # [R] int64, argmax of each row, ties towards the lower id
    taps: torch.Tensor | None  # [N, T*H], the hidden states selected with set_taps, or None; any floating-point dtype
    top: TopRows | None = None  # top entries of every row, if the target computed them: see `Target.set_top`
    # [R] tokens where `Segment.draw` asks for them, at least after the nodes to which these tokens lead from the root;
    # UNUSABLE: not possible.
    drawn: npt.NDArray[np.int32] | None = None

    def split(self, segments: Sequence[Segment]) -> list[ForwardOutput]:
        """Splits into one output per segment; all are views."""
        if len(segments) == 1:
            return [self]
        num_rows = [segment.num_logits for segment in segments]
        sizes = [len(segment.token_ids) for segment in segments]
        ends = list(accumulate(num_rows))
        taps: Sequence[torch.Tensor | None] = (
            [None] * len(sizes) if self.taps is None else self.taps.split_with_sizes(sizes)
        )
        top: Sequence[TopRows | None] = [None] * len(sizes)
        if self.top is not None:
            top = [self.top.at(slice(end - count, end)) for end, count in zip(ends, num_rows, strict=True)]
        views = [each.split_with_sizes(num_rows) for each in (self.logits, self.greedy_ids)]
        return list(map(ForwardOutput, *views, taps, top))

    def only(self, segments: Sequence[Segment], index: int) -> ForwardOutput:
        """The output of one segment; views, as in ``split``."""
        first = sum([segment.num_logits for segment in segments[:index]])
        start = sum([len(segment.token_ids) for segment in segments[:index]])
        segment = segments[index]
        rows, nodes = slice(first, first + segment.num_logits), slice(start, start + len(segment.token_ids))
        taps = None if self.taps is None else self.taps[nodes]
        top = None if self.top is None else self.top.at(rows)
        return ForwardOutput(self.logits[rows], self.greedy_ids[rows], taps, top)


class PendingPass(ABC):
    """A pass that was started."""

    @abstractmethod
    def wait(self) -> ForwardOutput:
        """Waits for the result. Call it before the next pass of the same lane is launched, or the result must be
        copied then."""

    def on_device(self) -> DeviceAnswer | None:
        """Where the device has the answer, for work that follows the pass there; None if that is not known. Valid until
        the next pass of the same lane is launched."""
        return None


class DeviceAnswer(NamedTuple):
    """Inputs and results of a pass over one tree: tensors on the device. The results are there when it has finished."""

    ids: torch.Tensor  # [N] of the nodes, then padding
    positions: torch.Tensor  # [N]
    slots: torch.Tensor  # [N] negative: padding
    words: torch.Tensor  # [N, W] bit j of word w: node 32*w + j is the node itself or above it; zeros in a chain
    tiles: torch.Tensor  # [T, TILE_FIELDS]
    choices: torch.Tensor  # [N, any] first: the token after each node, greedy or drawn
    taps: torch.Tensor  # [N, T*H]


class FinishedPass(PendingPass):
    """A pass that is already finished."""

    def __init__(self, output: ForwardOutput) -> None:
        self._output = output

    def wait(self) -> ForwardOutput:
        return self._output


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetInfo:
    """Properties of a target that other layers may use."""

    name: str
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    context_length: int
    dtype: torch.dtype
    device: torch.device
    eos_token_ids: tuple[int, ...]
    num_parameters: int
    cache_bytes_per_token: int
    backend: str  # "eager", "fused-cpu", "transformers", ...
    can_tap: bool = True
    can_tree: bool = True  # False: committed tokens only, no draft trees
    quantize: str | None = None  # 8-bit format of the weights, also part of the name; None: stored in dtype
    is_exact: bool = False  # the logits of a node have the same bits in every pass
    can_draw: bool = False  # passes draw sampled tokens: see `Segment.draw`
    keeps_taps: bool = False  # the memory of hidden states is not used again
    pass_sizes: tuple[int, ...] = ()  # if not empty: a pass is padded to the next of these sizes


class TargetParts(NamedTuple):
    """The parts of a target that draft heads share."""

    embed: torch.Tensor  # [V, H]
    norm: torch.Tensor  # [H], the final norm
    head: torch.Tensor  # [V, H]
    norm_eps: float


# (layer, query [..., N, heads, D], key [..., N, kv_heads, D], value [..., N, kv_heads, D]) -> [..., N, heads, D].
# Queries and keys are rotated. The function stores keys and values and applies the mask; the scale is D ** -0.5.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layers(Protocol):
    """The layers of a model, with attention supplied by the caller: it applies the mask and stores keys and values."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def states(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> Iterator[torch.Tensor]:
        """Yields the hidden states ``[..., N, H]`` of tokens ``[..., N]`` at ``positions [..., N]``: before every
        layer, and after the last."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the float32 logits ``[R, V]`` of last states ``[R, H]``."""


class Target(ABC):
    """Runs packed trees. Implementations refuse unsupported models when they are built."""

    info: TargetInfo
    num_lanes: int = 1

    @property
    def num_prepared(self) -> int:
        """How many passes had to be prepared before they ran, so that their time says nothing about later ones."""
        return 0

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """Total capacity of the cache in positions: no sequence can be larger."""

    @abstractmethod
    def open(self, capacity: int) -> int:
        """Reserves cache for a sequence of at most ``capacity`` positions, tree nodes included.

        Raises CapabilityError if there are not enough free slots; see ``can_open``.
        """

    @abstractmethod
    def can_open(self, capacity: int) -> bool: ...

    @abstractmethod
    def close(self, sequence: int) -> None:
        """Frees the sequence's slots. Safe at any time between two forwards."""

    @abstractmethod
    def length(self, sequence: int) -> int:
        """Returns the number of committed positions of the sequence."""

    @abstractmethod
    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        """Runs one pass over all segments, at most one per sequence. Commits nothing.

        Raises CapabilityError if ``after`` of a segment is larger than its pending tree.
        """

    def launch(self, segments: Sequence[Segment], lane: int = 0) -> PendingPass:
        """Starts a pass without waiting for it. Each of the ``num_lanes`` lanes may have one pending pass.

        Passes run in the order they were launched in, and later cache operations run after them. A sequence may be in
        one pending pass only.
        """
        return FinishedPass(self.forward(segments))

    def grow(self, segments: Sequence[Segment], plan: SearchPlan) -> list[Found] | None:
        """Runs segments of text, which end with a root each and want its logits, and a search below each root, without
        the host between passes. Commits the text; the nodes of the search are then the pending tree. None, with nothing
        committed, if the target cannot."""
        return None

    @abstractmethod
    def keep(self, sequence: int, nodes: Sequence[int]) -> None:
        """Commits ``nodes``, a path of the pending tree from node 0, ascending; drops the other nodes.

        Keys already have their final positions, so cache rows are moved and nothing is recomputed.
        """

    @abstractmethod
    def truncate(self, sequence: int, length: int) -> None:
        """Drops the committed positions from ``length`` on, and the pending tree."""

    @abstractmethod
    def resize(self, sequence: int, capacity: int) -> bool:
        """Gives the sequence another capacity and drops its pending tree. False, and unchanged, if it does not fit."""

    @abstractmethod
    def fork(self, sequence: int, capacity: int, length: int | None = None) -> int:
        """Opens a new sequence with a copy of the first ``length`` committed positions; None: all of them."""

    @abstractmethod
    def set_taps(self, layers: Sequence[int]) -> None:
        """Selects the hidden states that every forward returns: the inputs of these layers; ``num_layers`` is the last
        output before the final norm. Empty: none."""

    def parts(self) -> TargetParts:
        """Returns the embeddings, the final norm and the LM head, on the target's device."""
        raise CapabilityError(
            f"The target {self.info.name} does not expose its embeddings",
            got=self.info.backend,
            next_step="Use a drafter without a draft head.",
        )

    def layers(self) -> Layers | None:
        """Returns the layers to run rows outside the cache, as training does; None if that is not supported."""
        return None

    def set_top(self, k: int) -> None:
        """Asks for the top ``k`` entries of every row in the next pass; 0: none. A target may ignore it."""

    def ready_sizes(self, num_segments: int) -> tuple[int, ...]:
        """Sizes of passes over this many trees that can run at once, ascending; others may have to be prepared first.
        Empty: nothing has to be prepared."""
        return ()

    def prepare(self, largest: int, progress: Progress | None = None) -> None:
        """Does the one-time work for passes of up to ``largest`` positions, such as compiling GPU kernels."""


def chain_parents(size: int) -> list[int]:
    return list(range(-1, size - 1))


def depths_of(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths
