"""Whether requests are quicker with a draft model than without it.

A draft model costs more than its passes: hidden states, a longer start of each request, larger trees to learn from. So
whole cycles are timed, those of requests with it and those of requests without it. What it gains is known from trees
that were grown both ways for the same text: the tokens that each has of what came. Together they tell which way is
quicker, from far fewer requests than their speeds would, which differ by their texts.

A draft model knows more about some texts than about others. So each request also counts for itself, and goes on without
it where that is quicker.
"""

from __future__ import annotations

from draftwood.growth.readings import MeanTime

MEASURED = 32  # cycles of each way until they are compared
TRY_AGAIN = 16  # of so many requests one begins in the slower way
FOLLOWING = 0.02  # of mean times, by each cycle
DECAY = 0.99  # of tokens, by each pair of trees
FIRST_RATIO, FIRST_TOKENS = 1.3, 8.0  # prior: tokens with the draft model over those without it, and their weight
OWN_TOKENS = 12.0  # tokens' worth of belief that a request is like those before it
CLEAR = 1.02  # times as quick: what it takes to go on without it


class Worth:
    """By what all requests have shown, while no other one ran beside them."""

    def __init__(self) -> None:
        self._seconds = {True: MeanTime(FOLLOWING), False: MeanTime(FOLLOWING)}  # of cycles with it, and without
        self._has_begun = {True: False, False: False}
        self._with, self._without = FIRST_RATIO * FIRST_TOKENS, FIRST_TOKENS  # decayed sums of tokens
        self._num_begun = 0

    def note_cycle(self, seconds: float, *, has_model: bool) -> None:
        if self._has_begun[has_model]:
            self._seconds[has_model].note(seconds)
        self._has_begun[has_model] = True  # the very first one reads the weights

    def note_tokens(self, with_model: int, without: int) -> None:
        """Tokens of a cycle, the bonus token included, with the tree that it had and the one without the model."""
        self._with = DECAY * self._with + with_model
        self._without = DECAY * self._without + without

    def begins_with_model(self) -> bool:
        """Whether the next request begins with it. Each way is measured first, and again now and then."""
        for has_model, seconds in self._seconds.items():
            if seconds.weight < MEASURED:
                return has_model
        self._num_begun = (self._num_begun + 1) % TRY_AGAIN
        return self.pays(self.ratio) == (self._num_begun > 0)

    def pays(self, ratio: float) -> bool:
        """Whether so many tokens, relative to those without it, are worth the time of its cycles."""
        seconds, without = self._seconds[True], self._seconds[False]
        is_known = min(seconds.weight, without.weight) >= MEASURED
        return not is_known or CLEAR * ratio * without.seconds >= seconds.seconds

    @property
    def ratio(self) -> float:
        return self._with / self._without


class OwnWorth:
    """For one request."""

    def __init__(self, record: Worth) -> None:
        self.record = record
        self._with, self._without = OWN_TOKENS * record.ratio, OWN_TOKENS

    def note_tokens(self, with_model: int, without: int) -> None:
        self.record.note_tokens(with_model, without)
        self._with += with_model
        self._without += without

    @property
    def pays(self) -> bool:
        return self.record.pays(self._with / self._without)
