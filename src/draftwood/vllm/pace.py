"""Which guesses are worth their time: an estimate of what another position in a pass costs, from the run itself.

A step takes ``a + b * positions`` seconds; both are fitted to the steps of the recent past. A guess with a chance of
acceptance p adds p tokens and b seconds. It is worth it if p / b is more than the tokens per second so far.
"""

MIN_CHANCE, MAX_CHANCE = 0.05, 0.9
FIRST_CHANCE = 0.4  # before anything was measured
PRIOR_STEPS = 8.0  # weight of a cost of FIRST_CHANCE of a step per position
DECAY = 0.98  # per step
MAX_RATIO = 3.0  # a step that takes longer than this many times its prediction counts as this long


class Pace:
    def __init__(self) -> None:
        self._sums = [0.0] * 5  # decayed: steps, positions, seconds, positions^2, positions * seconds
        self._tokens = 0.0
        self.min_chance = FIRST_CHANCE

    def note(self, positions: int, seconds: float, tokens: int) -> None:
        """Take a reading: a pass over ``positions`` that accepted ``tokens``."""
        predicted = self._predict(positions)
        if predicted is not None:
            seconds = min(seconds, MAX_RATIO * predicted)
        new = 1.0, positions, seconds, positions * positions, positions * seconds
        self._sums = [DECAY * old + added for old, added in zip(self._sums, new, strict=True)]
        self._tokens = DECAY * self._tokens + min(tokens, positions)  # more were not guessed here
        steps, _, total, _, _ = self._sums
        per_second = self._tokens / max(total, 1e-9)
        measured = self._slope() * per_second
        share = steps / (steps + PRIOR_STEPS)
        self.min_chance = min(max(share * measured + (1.0 - share) * FIRST_CHANCE, MIN_CHANCE), MAX_CHANCE)

    def _predict(self, positions: int) -> float | None:
        steps, sum_positions, sum_seconds, _, _ = self._sums
        if steps < PRIOR_STEPS:
            return None
        return max(sum_seconds / steps + self._slope() * (positions - sum_positions / steps), 1e-9)

    def _slope(self) -> float:
        """Seconds per position by least squares, pulled towards the prior where positions hardly varied."""
        steps, sum_positions, sum_seconds, sum_squares, sum_products = self._sums
        mean_positions, mean_seconds = sum_positions / steps, sum_seconds / steps
        spread = sum_squares - steps * mean_positions**2
        covariance = sum_products - steps * mean_positions * mean_seconds
        # A position costs at most its share of a step.
        prior, highest = FIRST_CHANCE * mean_seconds / mean_positions, mean_seconds / mean_positions
        weight = 0.05 * mean_positions**2  # as if a few more steps had varied by a fifth
        return min(max((covariance + weight * prior) / (spread + weight), 0.0), highest)
