"""A progress bar with throughput in tokens/s."""

import time

from draftwood.cli.console.terminal import Paint, ProgressBar


class PaceBar(ProgressBar):
    """Shows tokens/s and the remaining time. Report generated tokens with ``add_tokens``."""

    def __init__(self, paint: Paint) -> None:
        super().__init__(paint)
        self._tokens = 0
        self._since = time.monotonic()

    def add_tokens(self, tokens: int) -> None:
        """Count generated tokens. The clock starts at the first call, so that loading does not count."""
        if not self._tokens:
            self._since = time.monotonic()
        self._tokens += tokens

    @property
    def pace(self) -> str:
        """Throughput as ``, 1,234 tokens/s``; empty before the first token."""
        seconds = time.monotonic() - self._since
        return f", {self._tokens / seconds:,.0f} tokens/s" if self._tokens and seconds > 0.0 else ""

    def _format_time_left(self, done: int, total: int, now: float) -> str:
        return super()._format_time_left(done, total, now) + self.pace
