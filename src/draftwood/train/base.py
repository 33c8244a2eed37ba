"""What the parts of training have in common: a batch of texts, what the frozen target says along them, and a method.

    batch = Batch.of(examples, device)
    signals = frozen.signals(batch)                        # no gradients: hidden states along the texts
    losses = method.losses(batch, signals)                 # gradients reach the head's parameters
    losses.total.backward()

Shapes: B texts of L tokens, padded at the end; T taps of width H. Position t of a text holds token t; its hidden state
has seen tokens 0 to t and says what token t + 1 is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftwood.errors import OptionError
from draftwood.heads import Head, HeadConfig

if TYPE_CHECKING:
    from draftwood.train.frozen import FrozenTarget


class Example(NamedTuple):
    """A text to learn from."""

    token_ids: npt.NDArray[np.int32]  # [n]
    answered: npt.NDArray[np.bool_]  # [n] tokens that the target wrote: those a head learns to guess


class Batch(NamedTuple):
    token_ids: Tensor  # [B, L] int64, padded with 0
    answered: Tensor  # [B, L] bool, False where padded
    lengths: Tensor  # [B] int64

    @classmethod
    def of(cls, examples: Sequence[Example], device: torch.device | str = "cpu") -> Batch:
        longest = max(len(example.token_ids) for example in examples)
        token_ids = torch.zeros(len(examples), longest, dtype=torch.int64)
        answered = torch.zeros(len(examples), longest, dtype=torch.bool)
        for row, example in enumerate(examples):
            size = len(example.token_ids)
            token_ids[row, :size] = torch.from_numpy(example.token_ids.astype(np.int64))
            answered[row, :size] = torch.from_numpy(example.answered)
        lengths = torch.tensor([len(example.token_ids) for example in examples])
        return cls(token_ids.to(device), answered.to(device), lengths.to(device))

    def positions(self) -> Tensor:
        """[B, L]"""
        size = self.token_ids.shape
        return torch.arange(size[1], device=self.token_ids.device).expand(size)

    def is_text(self) -> Tensor:
        """[B, L] False where padded."""
        return self.positions() < self.lengths[:, None]


class Signals(NamedTuple):
    """What the frozen target computed along a batch; no gradients flow into it."""

    taps: Tensor  # [B, L, T*H] the hidden states that the head reads: `HeadConfig.taps_for`
    hidden: Tensor  # [B, L, H] the last hidden state, before the final norm


class Losses(NamedTuple):
    """A loss to go down, and what is worth a line in the log."""

    total: Tensor  # [] mean over the positions that count
    parts: Mapping[str, Tensor]  # detached numbers by name: parts of the loss, accuracies
    weight: Tensor  # [] float: the number of positions that count; batches of several processes are joined by it


class Method(ABC):
    """How a head is trained. Built once for a run; options are its own record.

        method = method_class("hass")(options, head, frozen, seed)
        method.begin_step(step, num_steps)                     # before the batches of an optimiser step
        losses = method.losses(batch, signals)

    What is random follows from the seed, the step and the text alone: neither from what ran before nor from the batch
    a text is in. A head in evaluation mode (``head.eval()``) sees nothing random.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[str, ...]]  # of heads that it trains
    goes_on: ClassVar[bool] = False  # whether it makes a trained head better, and cannot begin with a new one
    Options: ClassVar[type[Any]]

    checkpoints: bool = False  # whether what lies between is computed again on the way back, to save memory
    block: int | None = None  # positions whose logits over the vocabulary are computed together; None: as many as fit

    def __init__(self, options: Any, head: Head, frozen: FrozenTarget, seed: int = 0) -> None:
        self.check_kind(head.config.kind)
        self.options = options
        self.head = head
        self.frozen = frozen
        self.seed = seed
        self.step = 0
        self.num_steps = 0  # 0: not known

    @classmethod
    def check_kind(cls, kind: str) -> None:
        if kind not in cls.kinds:
            raise OptionError(f"The method {cls.name!r} does not train heads of this kind", got=kind, allowed=cls.kinds)

    @classmethod
    def guesses_a_position(cls, options: Any, head: HeadConfig) -> int:
        """Outputs of the head that a position leads to, for estimates of memory."""
        return 1

    @classmethod
    def scores_a_position(cls, options: Any, head: HeadConfig, length: int) -> int:
        """Attention scores that are held at once, by position of texts of such a length; also for estimates."""
        return 0

    def begin_step(self, step: int, num_steps: int) -> None:
        """What changes as training goes on follows from this: optimiser step ``step``, from 0, of ``num_steps``."""
        self.step = step
        self.num_steps = num_steps

    @abstractmethod
    def losses(self, batch: Batch, signals: Signals) -> Losses: ...
