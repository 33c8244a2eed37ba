"""A progress bar for commands that make tokens: how many a second."""

from __future__ import annotations

import time

from draftwood.cli.console.terminal import Paint, ProgressBar


class PaceBar(ProgressBar):
    """Tells tokens/s beside the time that is left. Whoever makes tokens says so with ``hear``."""

    def __init__(self, paint: Paint) -> None:
        super().__init__(paint)
        self._tokens = 0
        self._since = time.monotonic()

    def hear(self, tokens: int) -> None:
        """The clock starts with the first of them: what came before was spent on other things."""
        if not self._tokens:
            self._since = time.monotonic()
        self._tokens += tokens

    @property
    def pace(self) -> str:
        """As in ``, 1,234 tokens/s``; nothing before there is a pace."""
        seconds = time.monotonic() - self._since
        return f", {self._tokens / seconds:,.0f} tokens/s" if self._tokens and seconds > 0.0 else ""

    def _time_left(self, done: int, total: int, now: float) -> str:
        return super()._time_left(done, total, now) + self.pace
