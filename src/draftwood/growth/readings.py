"""Times that are measured while other processes run."""

SLOWER = 0.05  # share of a slower reading
FOLLOWING = 0.1  # of a mean, by its next reading
MAX_LONGER = 3.0  # times the mean: a reading that is longer was disturbed, and counts as so long


def follow_time(known: float, seconds: float) -> float:
    """Update a time by a reading: other processes only add to it, so quicker readings are followed at once."""
    return seconds if not known or seconds < known else known + SLOWER * (seconds - known)


def follow_mean(known: float, seconds: float) -> float:
    """Update the mean of times that differ by themselves, as they depend on what is done."""
    return known + FOLLOWING * (min(seconds, MAX_LONGER * known) - known) if known else seconds
