"""Formats numbers for reports, the same in Markdown and HTML."""

import math
from typing import Any

from draftwood.bench.figures import Interval
from draftwood.bench.records import DIFFERENT, ERROR, IDENTICAL, TIE

NOTHING = "–"  # noqa: RUF001 - en dash for an empty cell
_VERDICTS = ((IDENTICAL, "identical", "identical"), (TIE, "tie", "ties"), (DIFFERENT, "different", "different"))


def finite(value: Any) -> float | None:
    """Return the number; None if it is missing, NaN or infinite."""
    if value is None or isinstance(value, (bool, str)):
        return None
    number = float(value.value if isinstance(value, Interval) else value)
    return number if math.isfinite(number) else None


def whole_interval(value: Interval | None) -> Interval | None:
    """Replace non-finite bounds by the value; None if the value is not finite."""
    middle = finite(value)
    if value is None or middle is None:
        return None
    low, high = finite(value.low), finite(value.high)
    return Interval(middle, middle if low is None else low, middle if high is None else high)


def number(value: Any, decimals: int = 2, unit: str = "") -> str:
    """Format a number with its unit, as ``2.02x``; a dash if it is missing."""
    figure = finite(value)
    return NOTHING if figure is None else f"{figure:.{decimals}f}{unit}"


def with_interval(value: Interval | None, decimals: int = 2, unit: str = "") -> str:
    """Format a number with its interval, as ``1.84x (1.71-1.97)``."""
    if finite(value) is None or value is None:
        return NOTHING
    if finite(value.low) is None or finite(value.high) is None:
        return number(value, decimals, unit)
    return f"{number(value, decimals, unit)} ({value.low:.{decimals}f}-{value.high:.{decimals}f})"


def percent(value: Any) -> str:
    figure = finite(value)
    return NOTHING if figure is None else f"{100 * figure:.1f}%"


def memory(value: Any) -> str:
    """Format a number of bytes."""
    figure = finite(value)
    if figure is None:
        return NOTHING
    return f"{figure / 2**30:.2f} GiB" if figure >= 2**30 else f"{figure / 2**20:.0f} MiB"


def large(value: Any) -> str:
    """Format a number of parameters, as 135M or 1.5B."""
    figure = finite(value)
    if figure is None:
        return str(value)
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if figure >= size:
            return f"{figure / size:.3g}{letter}"
    return f"{figure:.0f}"


def verdicts(lossless: dict[str, int]) -> str:
    """Format verdict counts, as ``24 identical, 1 tie``; errors are in capitals."""
    parts = [
        f"{lossless[name]} {one if lossless[name] == 1 else many}"
        for name, one, many in _VERDICTS
        if lossless.get(name)
    ]
    if lossless.get(ERROR):
        parts.append(f"{lossless[ERROR]} ERROR")
    return ", ".join(parts) or NOTHING


def counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
