"""Medusa and Hydra: every depth predicts its token from the target's hidden state; the loss is cross-entropy.

Depth d, from 1, reads the state before the root and predicts the d-th token after the root. Hydra heads also read the
tokens in between, which are those of the text.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftwood.drafters import check_flag, check_fraction
from draftwood.heads import HeadConfig, HydraHead, MedusaHead
from draftwood.train.attention import UnrolledAttention
from draftwood.train.base import Batch, Losses, Signals
from draftwood.train.losses import Evaluator, Positions
from draftwood.train.methods.base import Method
from draftwood.train.methods.unrolled import Recipe, combine_losses, zero_of


@dataclass(frozen=True, kw_only=True, slots=True)
class AheadOptions:
    decay: float = 0.8  # factor between the weights of consecutive depths
    soft: bool = False  # use the target's distributions as labels instead of the tokens of the text

    def __post_init__(self) -> None:
        check_fraction(self, "decay")
        check_flag(self, "soft")


class AheadMethod(Method):
    Options = AheadOptions
    options: AheadOptions
    head: MedusaHead | HydraHead

    def losses(self, batch: Batch, signals: Signals) -> Losses:
        num_depths = self.head.config.num_heads_ahead
        positions = Positions.of(batch)
        hidden = self._run_head(batch, signals, positions)  # [S, P, H]
        evaluator = Evaluator(self.head, self.frozen, self._compute_logits, hard=not self.options.soft)
        evaluation = evaluator.evaluate(hidden, positions, batch, signals.hidden, self.block)
        return combine_losses(
            Recipe(steps=num_depths, decay=self.options.decay), evaluation, None, positions.reached(num_depths)
        )

    def _run_head(self, batch: Batch, signals: Signals, positions: Positions) -> Tensor:
        num_depths = self.head.config.num_heads_ahead
        features = self.head.fuse(signals.taps.to(next(self.head.parameters()).dtype))  # [B, L, H]
        if not positions.number:
            return torch.zeros(num_depths, 0, features.shape[-1], device=features.device) + zero_of(self.head)
        num_roots = features.shape[1] - 2
        attend = UnrolledAttention().attend(0)
        hidden = self.head(features[:, :num_roots], batch.positions()[:, :num_roots], attend)  # [B, N, H]
        return positions.select([hidden] * num_depths, num_depths)

    @classmethod
    def outputs_per_position(cls, options: Any, head: HeadConfig) -> int:
        return head.num_heads_ahead

    def _compute_logits(self, hidden: Tensor, path_ids: Tensor) -> Tensor:
        embeds = self.head.embed(path_ids).to(hidden.dtype)  # [C, S, H]
        depths = range(1, len(hidden) + 1)
        return torch.stack([self.head.logits_at(d, hidden[d - 1], embeds[:, -d:]) for d in depths])


class MedusaMethod(AheadMethod):
    name = "medusa"
    kinds = ("medusa",)


class HydraMethod(AheadMethod):
    name = "hydra"
    kinds = ("hydra",)
