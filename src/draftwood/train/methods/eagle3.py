"""EAGLE-3: training-time test. Cross-entropy over several unrolled steps, with gradients through all of them."""

from dataclasses import dataclass

from draftwood.drafters import check_fraction, check_int
from draftwood.train.methods.unrolled import Recipe, UnrolledMethod


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Options:
    steps: int = 7  # unrolled steps
    decay: float = 0.8  # factor between the weights of consecutive steps

    def __post_init__(self) -> None:
        check_int(self, 1, "steps")
        check_fraction(self, "decay")


class Eagle3Method(UnrolledMethod):
    name = "eagle3"
    kinds = ("eagle3",)
    Options = Eagle3Options
    options: Eagle3Options

    def recipe(self) -> Recipe:
        return Recipe(steps=self.options.steps, decay=self.options.decay)
