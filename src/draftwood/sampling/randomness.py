"""Where chance enters: two questions, so that tests can answer them exhaustively and users can seed them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from draftwood.errors import ModelError


class Randomness(Protocol):
    def accept(self, probability: float) -> bool:
        """True with that probability; 0 is never accepted, 1 always."""

    def draw(self, probs: torch.Tensor) -> int:
        """A token from probs [V], which need not sum to 1. A token of probability 0 is never drawn."""


class SeededRandomness:
    """One per request: the same seed gives the same answers on every platform and device.

    numpy guarantees the bit stream of PCG64 across platforms and versions (and nothing about the distributions built
    on top of it), and all arithmetic happens in float64 on the CPU. Every question uses up exactly one number.
    """

    def __init__(self, seed: int | None = None, stream: int = 0) -> None:
        """``stream`` tells the samples of one request apart; without a seed every instance is different."""
        sequence = np.random.SeedSequence() if seed is None else np.random.SeedSequence(seed, spawn_key=(stream,))
        self._bits = np.random.PCG64(sequence)

    def accept(self, probability: float) -> bool:
        return self._uniform() < probability

    def draw(self, probs: torch.Tensor) -> int:
        cumulative = np.cumsum(probs.detach().to("cpu", torch.float64).numpy())  # [V]
        total = cumulative[-1]
        if not 0.0 < total < np.inf:
            raise ModelError(
                "The target gave no usable probabilities",
                got=f"a total of {total}",
                next_step="Its logits are not finite: try dtype float32.",
            )
        # The first token whose sum exceeds the number: one of probability 0 adds nothing to the sum and is skipped.
        token = int(np.searchsorted(cumulative, self._uniform() * total, side="right"))
        if token == len(cumulative):  # should the product ever round up to the total: the token that reaches it
            token = int(np.searchsorted(cumulative, total))
        return token

    def _uniform(self) -> float:
        """In [0, 1): the upper 53 bits, all that a float64 can hold."""
        return float(int(self._bits.random_raw()) >> 11) * 2.0**-53
