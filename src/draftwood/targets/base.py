"""The contract of a target: the model whose output must not change.

A target owns *sequences*. Each holds a committed prefix in the target's cache. One ``forward`` runs a packed batch: one
*segment* per sequence, side by side in one row of N positions, each segment a tree (or a chain) hanging off its
sequence's prefix. Nothing a forward writes is committed until ``keep`` says which nodes were accepted.

    sequence = target.open(capacity=512)
    target.forward([Segment(sequence, prompt, chain_parents(len(prompt)), num_logits=0)])
    target.keep(sequence, range(len(prompt)))              # a prompt is a chain that is kept whole
    output = target.forward([Segment(sequence, tree.tokens, tree.parents, num_logits=len(tree))])
    target.keep(sequence, path)                            # accepted nodes, root first; the others are forgotten
    target.close(sequence)

A tree may grow over several forwards. The nodes that a sequence's forwards have written since its last ``keep`` are its
*pending tree*; a segment with ``after`` goes on behind that many of them:

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

import torch

from draftwood.errors import CapabilityError
from draftwood.models import ModelConfig
from draftwood.progress import Progress
from draftwood.targets.toprows import TopRows

DEFAULT_TOP_K = 10  # best entries of a row that drafters learn from, where nothing else is said


class Segment(NamedTuple):
    """What one sequence contributes to a packed batch."""

    sequence: int
    token_ids: Sequence[int]  # [n]
    parents: Sequence[int]  # [n] nodes of the whole tree, -1 at node 0; a node sits at position prefix + depth
    num_logits: int  # logits are wanted for the last that many nodes: n for a tree, 0 or n for a prompt chunk
    after: int = 0  # so many nodes of the pending tree stay, the new ones are numbered from there; 0: a new tree


class ForwardOutput(NamedTuple):
    """The result of one packed forward. Rows follow the segments in order.

    A target may use its memory again: what must outlive the next forward has to be copied.
    """

    logits: torch.Tensor  # [R, V] float32, R = sum of num_logits
    greedy_ids: torch.Tensor  # [R] int64, argmax of each row, ties towards the lower id
    taps: torch.Tensor | None  # [N, T*H], the hidden states asked for with set_taps, or None
    top: TopRows | None = None  # the best entries of every row, if the target found them in its pass: `Target.set_top`

    def split(self, segments: Sequence[Segment]) -> list[ForwardOutput]:
        """One output per segment: views, nothing is copied."""
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


class PendingPass(ABC):
    """A pass under way."""

    @abstractmethod
    def wait(self) -> ForwardOutput:
        """Its result, once it is there; best asked for before the next pass of its lane is launched, or it has to be
        copied then."""


class FinishedPass(PendingPass):
    """A pass that has ended already."""

    def __init__(self, output: ForwardOutput) -> None:
        self._output = output

    def wait(self) -> ForwardOutput:
        return self._output


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetInfo:
    """What the rest of the program may know about a target."""

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
    can_tree: bool = True  # False: takes committed tokens only, so drafts are of no use
    quantize: str | None = None  # the 8-bit format of the weights, which is part of the name too; None: as in dtype
    pass_sizes: tuple[int, ...] = ()  # if not empty: a pass over n positions costs what the next of these sizes costs


class TargetParts(NamedTuple):
    """What draft heads use of their target."""

    embed: torch.Tensor  # [V, H]
    norm: torch.Tensor  # [H], the final norm
    head: torch.Tensor  # [V, H]
    norm_eps: float


# (layer, query [..., N, heads, D], key [..., N, kv_heads, D], value [..., N, kv_heads, D]) -> [..., N, heads, D].
# Queries and keys come rotated. The caller keeps keys and values and decides who sees whom; the scale is D ** -0.5.
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layers(Protocol):
    """The layers of a model for any rows: the caller decides which rows attend to which, and keeps keys and values."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device

    def states(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> Iterator[torch.Tensor]:
        """Hidden states ``[..., N, H]`` of tokens ``[..., N]`` at ``positions [..., N]``: before every layer, and after
        the last."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[R, V]`` of last states ``[R, H]``."""


class Target(ABC):
    """Runs packed trees. Implementations refuse what they cannot do when they are built, naming themselves."""

    info: TargetInfo
    num_lanes: int = 1

    @property
    @abstractmethod
    def num_slots(self) -> int:
        """Positions the cache holds in all: no sequence can be larger."""

    @abstractmethod
    def open(self, capacity: int) -> int:
        """Reserves cache for a sequence of at most ``capacity`` positions, tree nodes included.

        Raises CapabilityError if the free slots do not suffice; ``can_open`` asks first.
        """

    @abstractmethod
    def can_open(self, capacity: int) -> bool: ...

    @abstractmethod
    def close(self, sequence: int) -> None:
        """Frees the sequence's slots. Safe at any time between two forwards."""

    @abstractmethod
    def length(self, sequence: int) -> int:
        """Committed positions of the sequence."""

    @abstractmethod
    def forward(self, segments: Sequence[Segment]) -> ForwardOutput:
        """One pass over all segments; each sequence at most once. Commits nothing.

        Raises CapabilityError if a segment goes on after more nodes than are pending.
        """

    def launch(self, segments: Sequence[Segment], lane: int = 0) -> PendingPass:
        """Starts a pass and goes on; the passes of ``num_lanes`` lanes may be under way at once, one each.

        They run one after the other, in the order they were launched in, and what other calls do to the cache comes
        behind them; no sequence may be in two of them.
        """
        return FinishedPass(self.forward(segments))

    @abstractmethod
    def keep(self, sequence: int, nodes: Sequence[int]) -> None:
        """Commits the nodes of the sequence's pending tree that form a path from node 0; forgets the others.

        The nodes' keys already carry their final positions, so cache rows move and nothing is recomputed.
        """

    @abstractmethod
    def truncate(self, sequence: int, length: int) -> None:
        """Forgets the committed positions from ``length`` on, and the pending tree."""

    @abstractmethod
    def fork(self, sequence: int, capacity: int) -> int:
        """A new sequence with a copy of the committed prefix."""

    @abstractmethod
    def set_taps(self, layers: Sequence[int]) -> None:
        """Which hidden states every forward returns: the inputs of these layers, or ``num_layers`` for the last output
        before the final norm. Empty: none."""

    def parts(self) -> TargetParts:
        """Its embeddings and its way out, on its device."""
        raise CapabilityError(
            f"The target {self.info.name} does not show its embeddings",
            got=self.info.backend,
            next_step="Use a drafter without a head.",
        )

    def layers(self) -> Layers | None:
        """Its layers for those who run many rows apart from its cache, as training does; None: it lends none."""
        return None

    def set_top(self, k: int) -> None:
        """How many of the best entries of every row a forward should find by the way, 0: none. It is said before every
        pass, and it is a hint: a target may ignore it."""

    def prepare(self, largest: int, progress: Progress | None = None) -> None:
        """Does what the first passes of up to ``largest`` positions would have to do before they can run, if anything:
        a GPU's kernels are compiled for them."""


def chain_parents(size: int) -> list[int]:
    return list(range(-1, size - 1))


def depths_of(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths
