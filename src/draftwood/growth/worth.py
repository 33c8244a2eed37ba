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

SETTLING = 8  # first cycles of each way, which are slow
MEASURED = {True: 64, False: 32}  # cycles with the model, and without, until they are compared
SOON, MAX_STAY = 4, 32  # requests after which one begins in the slower way; twice as many while that stays the slower
FOLLOWING = 0.03  # of mean times, by each cycle
DECAY = 0.99  # of tokens, by each pair of trees
FIRST_RATIO, FIRST_TOKENS = 1.3, 8.0  # prior: tokens with the draft model over those without it, and their weight
OWN_TOKENS = 12.0  # tokens' worth of belief that a request is like those before it
MIN_PAIRS = 3  # pairs of trees that a request sees before it goes on without it
CLEAR = 1.02  # times as quick: what it takes to do so


class Worth:
    """By what requests have shown that drafted alone."""

    def __init__(self) -> None:
        self._seconds = {True: MeanTime(FOLLOWING), False: MeanTime(FOLLOWING)}  # of cycles with it, and without
        self._num_settling = {True: SETTLING, False: SETTLING}
        self._with, self._without = FIRST_RATIO * FIRST_TOKENS, FIRST_TOKENS  # decayed sums of tokens
        self._verdict = True  # the last one: whether it pays
        self._stay = self._left = SOON
        self._is_asked = False  # since the last cycle

    def note_cycle(self, seconds: float, *, has_model: bool) -> None:
        self._is_asked = False
        if self._num_settling[has_model]:
            self._num_settling[has_model] -= 1
        else:
            self._seconds[has_model].note(seconds)

    def note_tokens(self, with_model: int, without: int) -> None:
        """Tokens of a cycle, the bonus token included, with the tree that it had and the one without the model."""
        self._with = DECAY * self._with + with_model
        self._without = DECAY * self._without + without

    def begins_with_model(self) -> bool:
        """Whether the next request begins with it. Each way is measured first, and again now and then. Requests that
        begin beside others would measure nothing; all but the first of them begin with it."""
        if self._is_asked:
            return True
        self._is_asked = True
        for has_model, seconds in self._seconds.items():
            if seconds.weight < MEASURED[has_model]:
                return has_model
        before, self._verdict = self._verdict, self.pays(self.ratio)
        if self._verdict != before:
            self._stay = self._left = SOON
        self._left -= 1
        if self._left:
            return self._verdict
        self._left = self._stay = min(2 * self._stay, MAX_STAY)
        return not self._verdict

    def pays(self, ratio: float) -> bool:
        """Whether so many tokens, relative to those without it, are worth the time of its cycles."""
        if any(seconds.weight < MEASURED[has_model] for has_model, seconds in self._seconds.items()):
            return True  # nothing else is known
        return CLEAR * ratio * self._seconds[False].seconds >= self._seconds[True].seconds

    @property
    def ratio(self) -> float:
        return self._with / self._without


class OwnWorth:
    """For one request."""

    def __init__(self, record: Worth) -> None:
        self.record = record
        self._with, self._without = OWN_TOKENS * record.ratio, OWN_TOKENS
        self._num_pairs = 0

    def note_tokens(self, with_model: int, without: int) -> None:
        self.record.note_tokens(with_model, without)
        self._with += with_model
        self._without += without
        self._num_pairs += 1

    @property
    def pays(self) -> bool:
        return self._num_pairs < MIN_PAIRS or self.record.pays(self._with / self._without)
