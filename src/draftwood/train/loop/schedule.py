"""How large steps are as training goes on, and a running mean of what they lead to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftwood.train.config import OptimSection


def learning_rate(optim: OptimSection, step: int, num_steps: int) -> float:
    """Of step 0, 1, ...: up in a line, then down along half a cosine."""
    warmup = min(optim.warmup_steps, num_steps)
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    share = (step - warmup) / max(1, num_steps - warmup)
    end = optim.lr * optim.lr_end
    return end + (optim.lr - end) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))


def make_optimizer(optim: OptimSection, head: nn.Module) -> torch.optim.AdamW:
    """Matrices decay, norms and biases do not."""
    matrices = [p for p in head.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in head.parameters() if p.requires_grad and p.ndim <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=optim.betas,
        weight_decay=optim.weight_decay,
    )


class RunningMean:
    """An exponential mean of parameters (EMA). Early on it forgets faster, or the random start would stay in it."""

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
    def in_place(self) -> Iterator[None]:
        """The parameters are the mean for as long as the block lasts."""
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
