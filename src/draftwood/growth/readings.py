"""Times that are measured while other processes run."""

SLOWER = 0.05  # share of a slower reading
FOLLOWING = 0.1  # of a mean, by its next reading
MAX_LONGER = 3.0  # times the mean: a reading that is longer was disturbed, and counts as so long


def follow_time(known: float, seconds: float) -> float:
    """Update a time by a reading: other processes only add to it, so quicker readings are followed at once."""
    return seconds if not known or seconds < known else known + SLOWER * (seconds - known)


class MeanTime:
    """The mean of times that differ by themselves, as they depend on what is done: the last ones count most."""

    def __init__(self, following: float = FOLLOWING) -> None:
        """``following``: how quickly."""
        self._following = following
        self.seconds = 0.0
        self.weight = 0.0  # of all readings

    def note(self, seconds: float, share: float = 1.0) -> None:
        """``share``: of a reading that several requests note."""
        longest = MAX_LONGER * self.seconds if self.weight else seconds
        self.weight += share
        self.seconds += max(share / self.weight, self._following * share) * (min(seconds, longest) - self.seconds)
