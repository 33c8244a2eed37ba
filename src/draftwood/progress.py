"""Progress reporting: a callback for slow functions."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # label, done, total


def report(progress: Progress | None, label: str, done: int, total: int) -> None:
    if progress is not None:
        progress(label, done, total)
