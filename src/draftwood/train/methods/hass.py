"""HASS: EAGLE's loss over several unrolled steps, with extra weight on the target's top-k tokens."""

from dataclasses import dataclass, fields

from draftwood.drafters import check_flag, check_fraction, check_int
from draftwood.train.methods.unrolled import Recipe, UnrolledMethod, check_some_weight, check_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class HassOptions:
    steps: int = 3  # unrolled steps
    decay: float = 1.0  # factor between the weights of consecutive steps
    regression: float = 1.0  # weight of the smooth L1 distance to the target's feature
    classification: float = 10.0  # weight of the cross-entropy with the target's distribution
    top_k: int = 10  # number of the target's top tokens whose cross-entropy terms get extra weight
    top_k_weight: float = 10.0  # their extra weight
    noise: float = 0.2  # width of uniform noise on features of texts of 512 tokens; scaled by 512 / length
    detach: bool = True  # no gradient from a step into the previous one, as in the original

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
