"""Learning rate schedule, optimiser, and the moving average of the weights."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftwood.train.config import OptimSection


def learning_rate(optim: OptimSection, step: int, num_steps: int) -> float:
    """Return the rate of step 0, 1, ...: linear warm-up, then cosine decay."""
    warmup = min(optim.warmup_steps, num_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    share = (step - warmup) / max(1, num_steps - warmup)
    end = optim.lr * optim.lr_end
    return end + (optim.lr - end) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))


def make_optimizer(optim: OptimSection, head: nn.Module) -> torch.optim.AdamW:
    """Build AdamW with weight decay for matrices only, not for norms and biases."""
    matrices = [p for p in head.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in head.parameters() if p.requires_grad and p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
    )


class MovingAverage:
    """Exponential moving average (EMA) of parameters.

    The decay is lower in the first steps. Otherwise the random initial weights would remain in the average.
    """

    def __init__(self, parameters: Iterable[Tensor], decay: float) -> None:
        self._parameters = list(parameters)
        self.values = [p.detach().clone() for p in self._parameters]
        self._decay = decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self._decay, (1 + step) / (10 + step))
        for mean, parameter in zip(self.values, self._parameters, strict=True):
            mean.lerp_(parameter.detach(), 1.0 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the parameters by their average inside the block."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for mean, parameter in zip(self.values, self._parameters, strict=True):
            before = parameter.detach().clone()
            parameter.copy_(mean)
            mean.copy_(before)
