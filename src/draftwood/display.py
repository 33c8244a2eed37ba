"""Formats numbers for people."""

import math

_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_MIN_SPAN = 1e-9  # ticks are rounded to ten decimals


def duration(seconds: float) -> str:
    """Format a time, as 42 s, 3 min or 1 h 20 min."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Choose about ``wanted`` round numbers within bounds."""
    span = high - low
    if not (math.isfinite(span) and span > _MIN_SPAN):
        return [low] if math.isfinite(low) else [0.0]
    size = 10.0 ** math.floor(math.log10(span / wanted))
    step = next(size * factor for factor in _STEPS if span / (size * factor) <= wanted)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 10) for index in range(first, last + 1)]


def readable_size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{max(1, round(num_bytes / 1e6))} MB"
