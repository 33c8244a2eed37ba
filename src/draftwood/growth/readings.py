"""Times that are measured while other processes run."""

SLOWER = 0.05  # share of a slower reading


def follow_time(known: float, seconds: float) -> float:
    """Update a time by a reading: other processes only add to it, so quicker readings are followed at once."""
    return seconds if not known or seconds < known else known + SLOWER * (seconds - known)
