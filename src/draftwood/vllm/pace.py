"""Which guesses are worth their time: estimates of what positions of a pass cost, from the run itself.

A step takes ``a + b * positions`` seconds, and ``c`` more if anything is guessed at all; fitted to the steps of the
recent past.

- A guess with a chance of acceptance p adds p tokens and b seconds. It is worth it if p / b is more than the tokens per
  second so far. Where the times of steps are noisy, positions may be dearer than they look: b is taken one standard
  error higher.
- The guesses of a step together must also pay for c, by the share of guesses that were accepted so far. Otherwise the
  step guesses nothing.

Both kinds of steps must be seen to tell c. So a step without guesses is made if there was none for long, and one with
guesses after some without.
"""

from math import sqrt

import numpy as np

MIN_CHANCE, MAX_CHANCE = 0.2, 0.9
FIRST_CHANCE = 0.4  # before anything was measured
PRIOR_STEPS = 8.0  # weight of FIRST_CHANCE
PRIOR_GUESSES = 16.0  # weight of FIRST_CHANCE as the share of accepted guesses
DECAY = 0.99  # per step
MIN_SEEN = 0.5  # decayed number of steps of either kind
RETRY_STEPS = 32  # without guesses
MAX_RATIO = 1.5  # a step that takes longer than this many times its prediction counts as this long


class Pace:
    def __init__(self) -> None:
        # Decayed sums over steps, of products of: 1, positions, whether anything was guessed, seconds.
        self._sums = np.zeros((4, 4))
        self._tokens = 0.0
        self._guesses = self._accepted = 0.0
        self._costs = np.zeros(3)  # a, b, c
        self._idle_steps = 0  # in a row, because guesses did not pay
        self.min_chance = FIRST_CHANCE

    def note(self, rows: int, guesses: int, seconds: float, tokens: int) -> None:
        """Take a reading: a pass over ``rows`` requests with ``guesses`` that gave ``tokens``."""
        step = np.array([1.0, rows + guesses, guesses > 0, seconds])
        if self._sums[0, 0] >= PRIOR_STEPS:
            step[3] = min(seconds, MAX_RATIO * max(float(self._costs @ step[:3]), 1e-9))
        tokens = min(tokens, rows + guesses)  # more were not guessed here
        self._sums = DECAY * self._sums + np.outer(step, step)
        self._tokens = DECAY * self._tokens + tokens
        self._guesses = DECAY * self._guesses + guesses
        self._accepted = DECAY * self._accepted + max(tokens - rows, 0)
        error = self._fit()
        steps, positions, _, total = self._sums[0]
        highest = total / positions  # a position costs at most its share of a step
        measured = min(max(self._costs[1] + error, 0.0), highest) * self._tokens / max(total, 1e-9)
        share = steps / (steps + PRIOR_STEPS)
        self.min_chance = float(np.clip(share * measured + (1.0 - share) * FIRST_CHANCE, MIN_CHANCE, MAX_CHANCE))

    def pays(self, rows: int, guesses: int) -> bool:
        """Whether a step of that many requests gives more tokens per second with the guesses than without."""
        pays = self._idle_steps >= RETRY_STEPS or self._seem_to_pay(rows, guesses)
        self._idle_steps = 0 if pays else self._idle_steps + 1
        return pays

    def _seem_to_pay(self, rows: int, guesses: int) -> bool:
        steps, with_guesses = self._sums[0, 0], self._sums[0, 2]
        if steps < PRIOR_STEPS or with_guesses < MIN_SEEN:
            return True
        if steps - with_guesses < MIN_SEEN:
            return False
        start, slope, more = self._costs
        plain = max(start + slope * rows, 1e-9)
        longer = max(slope * guesses + more, 0.0) / plain
        accepted = (self._accepted + PRIOR_GUESSES * FIRST_CHANCE) / (self._guesses + PRIOR_GUESSES)
        return bool(accepted * guesses / rows >= longer)

    def _fit(self) -> float:
        """Fit the costs by least squares; return the standard error of b: infinite if positions never varied."""
        steps = self._sums[0, 0]
        kinds = min(self._sums[0, 2], steps - self._sums[0, 2])
        size = 3 if kinds >= MIN_SEEN else 2  # c needs steps of both kinds
        inputs, outputs = self._sums[:size, :size], self._sums[:size, 3]
        spread = inputs[1, 1] - inputs[0, 1] ** 2 / steps
        self._costs = np.array([outputs[0] / steps, 0.0, 0.0])
        if spread < 1e-6 * inputs[1, 1] or np.linalg.cond(inputs) > 1e12:
            return float("inf")
        inverse = np.linalg.inv(inputs)
        self._costs[:size] = inverse @ outputs
        residual = max(float(self._sums[3, 3] - self._costs[:size] @ outputs), 0.0)
        return sqrt(residual / steps * max(float(inverse[1, 1]), 0.0))
