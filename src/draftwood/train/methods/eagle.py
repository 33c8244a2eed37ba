"""EAGLE: predict the target's next feature and distribution from the target's own features."""

from dataclasses import dataclass

from draftwood.train.methods.unrolled import Recipe, UnrolledMethod, check_some_weight, check_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class EagleOptions:
    regression: float = 1.0  # weight of the smooth L1 distance to the target's feature
    classification: float = 10.0  # weight of the cross-entropy with the target's distribution
    noise: float = 0.2  # width of uniform noise on features of texts of 512 tokens; scaled by 512 / length

    def __post_init__(self) -> None:
        check_some_weight(self, "regression", "classification")
        check_weights(self, "noise")


class EagleMethod(UnrolledMethod):
    name = "eagle"
    Options = EagleOptions
    options: EagleOptions

    def recipe(self) -> Recipe:
        options = self.options
        return Recipe(regression=options.regression, classification=options.classification, noise=options.noise)
