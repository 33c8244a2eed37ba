"""GRIFFIN: like HASS, but deeper steps learn only where a draft tree would have reached.

A prediction of step j counts if the text's token was in the head's top ``close`` at every earlier step. Steps are added
one by one in stages of equal length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.drafters import check_flag, check_int
from draftwood.train.base import Batch
from draftwood.train.losses import Evaluation, Positions
from draftwood.train.methods.hass import HassMethod, HassOptions
from draftwood.train.methods.unrolled import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class GriffinOptions(HassOptions):
    close: int = 3  # top-k of the head that must contain the text's token
    staged: bool = True  # add steps one by one during training

    def __post_init__(self) -> None:
        HassOptions.__post_init__(self)
        check_int(self, 1, "close")
        check_flag(self, "staged")


class GriffinMethod(HassMethod):
    name = "griffin"
    kinds = ("eagle", "eagle3")
    Options = GriffinOptions
    options: GriffinOptions

    def recipe(self) -> Recipe:
        recipe = super().recipe()._replace(steps=self._current_steps(), close_k=self.options.close)
        if self.head.config.kind == "eagle":
            return recipe
        return recipe._replace(regression=0.0, noise=0.0)  # EAGLE-3 heads have no target features to regress to

    def counted(self, evaluation: Evaluation, positions: Positions, batch: Batch) -> Tensor:
        """Count a prediction if the previous step was close one position earlier. Tokens that the target did not
        generate have no prediction and block nothing."""
        counted: list[Tensor] = []
        is_reached = torch.ones_like(batch.answered)  # [B, L]: whether the steps so far reached this position
        for close, reached in zip(evaluation.close, positions.reached(len(evaluation.close)), strict=True):
            counted.append(reached & positions.at(is_reached, ahead=-1) if counted else reached)
            is_reached = torch.ones_like(is_reached)
            is_reached[positions.text, positions.last] = counted[-1] & close
        return torch.stack(counted)

    def _current_steps(self) -> int:
        options = self.options
        if not options.staged or not self.num_steps:
            return options.steps
        return min(1 + self.step * options.steps // self.num_steps, options.steps)
