"""Which guesses are worth their time: estimates of what positions of a pass cost, from the run itself.

A step takes ``a + b * positions`` seconds, and ``c`` more if anything is guessed at all; fitted to the steps of the
recent past. Where these say little (few, noisy, or all alike), the fit stays near what is assumed at the start: a guess
is worth it from a chance of ``FIRST_CHANCE``, and c is 0.

- A guess with a chance of acceptance p adds p tokens and b seconds. It is worth it if p / b is more than the tokens per
  second so far. The guesses taken are those whose chances look best, and so are too high on average: p must be higher
  by a margin.
- The guesses of a step together must also pay for c. Otherwise the step guesses nothing.
- Chances are learned slowly, and are too high for a while after the kind of text has changed. So they are multiplied by
  the number of guesses accepted lately, relative to the number expected.

Both kinds of steps must be seen to tell c. So a step without guesses is made if there was none for long, and one with
guesses after some without.
"""

from math import sqrt

import numpy as np

MIN_CHANCE, MAX_CHANCE = 0.3, 0.9
MARGIN = 1.4
FIRST_CHANCE, CHANCE_SPREAD = 0.4, 0.2  # before anything was measured: mean and standard deviation, margin excluded
MORE_SPREAD = 0.1  # standard deviation of c, relative to the time of a step
MIN_NOISE = 0.03  # standard deviation of the time of a step, relative to it
MIN_TRUST = 0.25  # guesses must be made to learn from them
PRIOR_ACCEPTED = 8.0  # weight of the chances as they are
DECAY = 0.99  # per step
MIN_SEEN = 0.5  # decayed number of steps without guesses
RETRY_STEPS = 32  # without guesses
MAX_RATIO = 1.5  # a step that takes longer than this many times its prediction counts as this long
FIRST_STEPS = 8.0  # that count as they are


class Pace:
    def __init__(self) -> None:
        # Decayed sums over steps, of products of: 1, positions, whether anything was guessed, seconds.
        self._sums = np.zeros((4, 4))
        self._tokens = 0.0
        self._expected = self._accepted = 0.0  # guesses
        self._costs = np.zeros(3)  # a, b, c
        self._noise = 0.0  # standard deviation of the time of a step
        self._worth = FIRST_CHANCE  # the chance that a guess must have
        self._idle_steps = 0  # in a row, because guesses did not pay

    @property
    def min_chance(self) -> float:
        """The chance that a guess must have, as chances are learned."""
        return min(self._worth / self._trust, MAX_CHANCE)

    @property
    def _trust(self) -> float:
        """What chances are multiplied by."""
        ratio = (self._accepted + PRIOR_ACCEPTED) / (self._expected + PRIOR_ACCEPTED)
        return min(max(ratio, MIN_TRUST), 1.0)

    def note(self, rows: int, guesses: int, expected: float, seconds: float, tokens: int) -> None:
        """Take a reading: a pass over ``rows`` requests that gave ``tokens``; ``expected``: the sum of the chances of
        its ``guesses``."""
        step = np.array([1.0, rows + guesses, guesses > 0, seconds])
        if self._sums[0, 0] >= FIRST_STEPS:
            step[3] = min(seconds, MAX_RATIO * max(float(self._costs @ step[:3]), 1e-9))
        tokens = min(tokens, rows + guesses)  # more were not guessed here
        self._sums = DECAY * self._sums + np.outer(step, step)
        self._tokens = DECAY * self._tokens + tokens
        self._expected = DECAY * self._expected + expected
        self._accepted = DECAY * self._accepted + max(tokens - rows, 0)
        self._fit()
        chance = MARGIN * self._costs[1] * self._tokens / max(self._sums[0, 3], 1e-9)
        self._worth = float(np.clip(chance, MIN_CHANCE, MAX_CHANCE))

    def pays(self, rows: int, guesses: int, expected: float) -> bool:
        """Whether a step of that many requests gives more tokens per second with the guesses than without."""
        pays = self._idle_steps >= RETRY_STEPS or self._seems_to_pay(rows, guesses, expected)
        self._idle_steps = 0 if pays else self._idle_steps + 1
        return pays

    def _seems_to_pay(self, rows: int, guesses: int, expected: float) -> bool:
        steps, _, with_guesses, _ = self._sums[0]
        if steps >= FIRST_STEPS and steps - with_guesses < MIN_SEEN:
            return False
        start, slope, more = self._costs
        plain = max(start + slope * rows, 1e-9)
        longer = max(slope * guesses + more, 0.0) / plain
        return bool(self._trust * expected / rows >= longer)

    def _fit(self) -> None:
        """Fit the costs by least squares. What is assumed about b and c counts as further readings of them."""
        steps, _, _, total = self._sums[0]
        step, token = total / steps, total / max(self._tokens, 1e-9)  # seconds
        noise = max(self._noise, MIN_NOISE * step, 1e-9)
        assumed = np.array([0.0, FIRST_CHANCE * token, 0.0])
        weights = np.array([0.0, noise / (CHANCE_SPREAD * token), noise / (MORE_SPREAD * step)]) ** 2
        inputs, outputs = self._sums[:3, :3], self._sums[:3, 3]
        self._costs = np.linalg.solve(inputs + np.diag(weights), outputs + weights * assumed)
        left = self._sums[3, 3] - 2.0 * self._costs @ outputs + self._costs @ inputs @ self._costs
        self._noise = sqrt(max(float(left), 0.0) / steps)
