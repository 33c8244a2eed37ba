"""HASS: EAGLE's loss along several steps on the head's own features, with weight on the target's likeliest tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields

from draftwood.drafters import check_flag, check_fraction, check_int
from draftwood.train.methods.unrolled import Recipe, UnrolledMethod, check_some_weight, check_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class HassOptions:
    steps: int = 3
    decay: float = 1.0  # of a step's weight against the one before
    regression: float = 1.0  # weight of the distance from the target's feature
    classification: float = 10.0  # weight of the cross-entropy with the target's distribution
    top_k: int = 10  # the target's likeliest tokens, whose part of the cross-entropy counts once more
    top_k_weight: float = 10.0
    noise: float = 0.2  # width of the uniform noise on features, for texts of 512 tokens; less on longer ones
    detach: bool = True  # no gradient from a step into the one before it, as in the original

    def __post_init__(self) -> None:
        check_int(self, 1, "steps", "top_k")
        check_fraction(self, "decay")
        check_some_weight(self, "regression", "classification", "top_k_weight")
        check_weights(self, "noise")
        check_flag(self, "detach")


class HassMethod(UnrolledMethod):
    name = "hass"
    Options = HassOptions
    options: HassOptions

    def recipe(self) -> Recipe:
        return Recipe(**{f.name: getattr(self.options, f.name) for f in fields(HassOptions)})
