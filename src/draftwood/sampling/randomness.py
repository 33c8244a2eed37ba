"""Where chance enters: two questions, so that tests can answer them exhaustively and users can seed them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

import numpy as np
import torch

from draftwood.errors import ModelError

BLOCK = 512  # tokens that are added up before their sums are: close to the root of a large vocabulary
UNUSABLE = -1  # the token of a row whose probabilities have no finite total


class Randomness(Protocol):
    def accept(self, probability: float) -> bool:
        """True with that probability; 0 is never accepted, 1 always."""

    def draw(self, probs: torch.Tensor) -> int:
        """A token from probs [V], which need not sum to 1. A token of probability 0 is never drawn."""


class SeededRandomness:
    """One per request: the same seed gives the same answers on every platform and device.

    numpy guarantees the bit stream of PCG64 across platforms and versions (and nothing about the distributions built
    on top of it), and all arithmetic happens in float64. Every question uses up exactly one number.
    """

    def __init__(self, seed: int | None = None, stream: int = 0) -> None:
        """``stream`` tells the samples of one request apart; without a seed every instance is different."""
        sequence = np.random.SeedSequence() if seed is None else np.random.SeedSequence(seed, spawn_key=(stream,))
        self._bits = np.random.PCG64(sequence)
        self._ahead: deque[float] = deque()  # numbers that were looked at before they are used

    def accept(self, probability: float) -> bool:
        return self._next() < probability

    def draw(self, probs: torch.Tensor) -> int:
        if not probs.is_cpu:
            return check_drawn(draw_tokens(probs[None], [self._next()])[0])
        cumulative = np.cumsum(probs.detach().double().numpy())  # [V]
        total = cumulative[-1]
        if not 0.0 < total < np.inf:
            return check_drawn(UNUSABLE)
        # The first token whose sum exceeds the number: one of probability 0 adds nothing to the sum and is skipped.
        token = int(np.searchsorted(cumulative, self._next() * total, side="right"))
        if token == len(cumulative):  # should the product ever round up to the total: the token that reaches it
            token = int(np.searchsorted(cumulative, total))
        return token

    def upcoming(self, count: int) -> list[float]:
        """The numbers of the next ``count`` questions, which do not use them up."""
        while len(self._ahead) < count:
            self._ahead.append(self._uniform())
        return list(islice(self._ahead, count))

    def skip(self, count: int) -> None:
        """As if ``count`` questions had been asked."""
        for _ in range(count):
            self._next()

    def _next(self) -> float:
        return self._ahead.popleft() if self._ahead else self._uniform()

    def _uniform(self) -> float:
        """In [0, 1): the upper 53 bits, all that a float64 can hold."""
        return float(int(self._bits.random_raw()) >> 11) * 2.0**-53


def draw_tokens(probs: torch.Tensor, numbers: Sequence[float]) -> list[int]:
    """What ``draw`` gives for each row of ``probs [n, V]`` with its number, on the rows' device: only tokens travel.

    A row without a finite total gives UNUSABLE. Rows are added up block by block, and token by token only inside the
    block that the number falls into. Sums that are made side by side may go up where the probability is 0, by rounding;
    such a token is passed over.
    """
    probs = probs.detach()
    vocab_size = probs.shape[1]
    whole = vocab_size // BLOCK
    blocks = probs[:, : whole * BLOCK].view(len(probs), whole, BLOCK).sum(dim=-1, dtype=torch.float64)
    rest = probs[:, whole * BLOCK :].sum(dim=-1, keepdim=True, dtype=torch.float64)
    sums = torch.cat((blocks, rest), dim=1)  # [n, blocks]
    reached = sums.cumsum(dim=-1)
    totals = reached[:, -1:]
    shares = torch.tensor(numbers, dtype=torch.float64, device=probs.device)[:, None] * totals
    block = _first_beyond(sums, reached, shares)
    ids = block * BLOCK + torch.arange(BLOCK, device=probs.device)  # [n, BLOCK]
    inside = probs.gather(1, ids.clamp(max=vocab_size - 1)).double().masked_fill(ids >= vocab_size, 0.0)
    shares = shares - (reached - sums).gather(1, block)
    token = block * BLOCK + _first_beyond(inside, inside.cumsum(dim=-1), shares)
    tokens: list[int] = token.masked_fill(~((totals > 0.0) & (totals < torch.inf)), UNUSABLE)[:, 0].tolist()
    return tokens


def check_drawn(token: int) -> int:
    """The token; refuses the one of a row that has no total."""
    if token == UNUSABLE:
        raise ModelError(
            "The target gave no usable probabilities",
            got="a total that is zero or no finite number",
            next_step="Its logits are not finite: try dtype float32.",
        )
    return token


def _first_beyond(weights: torch.Tensor, reached: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The place [n, 1] of the first weight > 0 whose sum in ``reached`` exceeds the share [n, 1]; where rounding lets
    none exceed it, of the last weight > 0."""
    places = torch.arange(weights.shape[1], device=weights.device)
    possible = weights > 0.0
    last = places.where(possible, -1).amax(dim=-1, keepdim=True)
    found: torch.Tensor = (possible & ((reached > shares) | (places == last))).int().argmax(dim=-1, keepdim=True)
    return found
