"""Which guesses are worth their time: an estimate of what another position in a pass costs, from the run itself.

A step takes ``a + b * positions`` seconds, fitted to the steps of the recent past. A guess with a chance of acceptance
p adds p tokens and b seconds. It is worth it if p / b is more than the tokens per second so far. Where the times of
steps are noisy, positions may be dearer than they look: b is taken one standard error higher.
"""

from math import sqrt

MIN_CHANCE, MAX_CHANCE = 0.2, 0.9
FIRST_CHANCE = 0.4  # before anything was measured
PRIOR_STEPS = 8.0  # weight of FIRST_CHANCE
DECAY = 0.98  # per step
MAX_RATIO = 3.0  # a step that takes longer than this many times its prediction counts as this long


class Pace:
    def __init__(self) -> None:
        # Decayed sums: steps, positions, seconds, positions^2, positions * seconds, seconds^2, tokens.
        self._sums = [0.0] * 7
        self.min_chance = FIRST_CHANCE

    def note(self, positions: int, seconds: float, tokens: int) -> None:
        """Take a reading: a pass over ``positions`` that accepted ``tokens``."""
        if self._sums[0] >= PRIOR_STEPS:
            seconds = min(seconds, MAX_RATIO * self._predict(positions))
        accepted = min(tokens, positions)  # more were not guessed here
        new = 1.0, positions, seconds, positions**2, positions * seconds, seconds**2, accepted
        self._sums = [DECAY * old + added for old, added in zip(self._sums, new, strict=True)]
        steps, sum_positions, sum_seconds = self._sums[:3]
        slope, error = self._fit()
        highest = sum_seconds / sum_positions  # a position costs at most its share of a step
        measured = min(max(slope + error, 0.0), highest) * self._sums[6] / max(sum_seconds, 1e-9)
        share = steps / (steps + PRIOR_STEPS)
        self.min_chance = min(max(share * measured + (1.0 - share) * FIRST_CHANCE, MIN_CHANCE), MAX_CHANCE)

    def _predict(self, positions: int) -> float:
        steps, sum_positions, sum_seconds = self._sums[:3]
        return max(sum_seconds / steps + self._fit()[0] * (positions - sum_positions / steps), 1e-9)

    def _fit(self) -> tuple[float, float]:
        """Seconds per position by least squares, and its standard error; infinite if positions never varied."""
        steps, sum_x, sum_y, sum_xx, sum_xy, sum_yy, _ = self._sums
        spread = sum_xx - sum_x**2 / steps
        if spread < 1e-6 * sum_xx:
            return 0.0, float("inf")
        slope = (sum_xy - sum_x * sum_y / steps) / spread
        residual = max(sum_yy - sum_y**2 / steps - slope**2 * spread, 0.0)
        return slope, sqrt(residual / steps / spread)
