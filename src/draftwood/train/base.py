"""Shared records of training: a batch of texts, the hidden states of the frozen target, and the losses of a method.

    batch = Batch.of(examples, device)
    signals = frozen.signals(batch)                        # no gradients: hidden states along the texts
    losses = method.losses(batch, signals)                 # gradients reach the head's parameters
    losses.total.backward()

Shapes: B texts of L tokens, padded at the end; T taps of width H. Position t of a text holds token t; its hidden state
has seen tokens 0 to t and predicts token t + 1.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Example(NamedTuple):
    """A text to train on."""

    token_ids: npt.NDArray[np.int32]  # [n]
    answered: npt.NDArray[np.bool_]  # [n] tokens that the target generated: those that the head learns to predict


class Batch(NamedTuple):
    token_ids: Tensor  # [B, L] int64, padded with 0
    answered: Tensor  # [B, L] bool, False where padded
    lengths: Tensor  # [B] int64

    @classmethod
    def of(cls, examples: Sequence[Example], device: torch.device | str = "cpu") -> Self:
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
        """[B, L] bool, False at padding."""
        return self.positions() < self.lengths[:, None]


class Signals(NamedTuple):
    """Outputs of the frozen target along a batch, without gradients."""

    taps: Tensor  # [B, L, T*H] the hidden states that the head reads, see `HeadConfig.taps_for`
    hidden: Tensor  # [B, L, H] the last hidden state, before the final norm


class Losses(NamedTuple):
    """The loss to minimise, and values for the log."""

    total: Tensor  # [] mean over the counted positions
    parts: Mapping[str, Tensor]  # detached numbers by name: parts of the loss, accuracies
    weight: Tensor  # [] float: the number of counted positions, by which micro-batches and processes are averaged
