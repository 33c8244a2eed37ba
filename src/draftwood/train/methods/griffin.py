"""GRIFFIN: as HASS, but deeper steps learn only where a draft tree would have got to.

A guess of step j counts if the text's token was among the head's ``close`` likeliest at every step before it. Steps are
added one by one: training falls into as many stages of equal length as there are steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.drafters import check_flag, check_whole
from draftwood.train.base import Batch
from draftwood.train.losses import Evaluation, Positions
from draftwood.train.methods.hass import HassMethod, HassOptions
from draftwood.train.methods.unrolled import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class GriffinOptions(HassOptions):
    close: int = 3  # the head's likeliest tokens, among which that of the text must have been
    staged: bool = True

    def __post_init__(self) -> None:
        HassOptions.__post_init__(self)
        check_whole(self, 1, "close")
        check_flag(self, "staged")


class GriffinMethod(HassMethod):
    name = "griffin"
    kinds = ("eagle", "eagle3")
    Options = GriffinOptions
    options: GriffinOptions

    def recipe(self) -> Recipe:
        recipe = super().recipe()._replace(steps=self._steps_now(), close_k=self.options.close)
        if self.head.config.kind == "eagle":
            return recipe
        return recipe._replace(regression=0.0, noise=0.0)  # the features of EAGLE-3 heads are their own

    def counted(self, evaluation: Evaluation, positions: Positions, batch: Batch) -> Tensor:
        """A guess was led to by those of the steps before it, one position before; what is not guessed, since the
        target did not write it, stands in nobody's way."""
        counted: list[Tensor] = []
        on_the_way = torch.ones_like(batch.answered)  # [B, L]: the steps so far got this far, by position
        for close, reached in zip(evaluation.close, positions.reached(len(evaluation.close)), strict=True):
            counted.append(reached & positions.at(on_the_way, ahead=-1) if counted else reached)
            on_the_way = torch.ones_like(on_the_way)
            on_the_way[positions.text, positions.last] = counted[-1] & close
        return torch.stack(counted)

    def _steps_now(self) -> int:
        options = self.options
        if not options.staged or not self.num_steps:
            return options.steps
        return min(1 + self.step * options.steps // self.num_steps, options.steps)
