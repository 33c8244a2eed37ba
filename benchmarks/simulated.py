"""The clock of a simulated GPU: what simulated_gpu.py and simulated_batches.py share. Import it before anything that
reads ``time.perf_counter``.

Time is the CPU time of the host, times ``NOW.host``, and what it waits for passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # positions of passes
LARGE_STEP = 512


class SimulatedTime:
    """Seconds of the host's CPU and of waiting."""

    def __init__(self) -> None:
        self.host = 1.0  # times the CPU time here
        self.waited = 0.0
        self.in_table = 0.0  # CPU seconds that do not count: of what answers in place of a GPU

    def __call__(self) -> float:
        return self.host * (time.thread_time() - self.in_table) + self.waited

    def wait_until(self, moment: float) -> None:
        self.waited += max(moment - self(), 0.0)

    def leave_out(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which takes no time."""

        def free(*args: Any, **kwargs: Any) -> Any:
            started = time.thread_time()
            result = function(*args, **kwargs)
            self.in_table += time.thread_time() - started
            return result

        return free


NOW = SimulatedTime()
time.perf_counter = NOW  # type: ignore[assignment]


# ruff: noqa: E402 - modules keep the clock that they find
from draftwood.targets import ForwardOutput, PendingPass


class SimulatedPass(PendingPass):
    def __init__(self, output: ForwardOutput, ready: float) -> None:
        self._output, self._ready = output, ready

    def wait(self) -> ForwardOutput:
        NOW.wait_until(self._ready)
        return self._output


class Gpu:
    """Runs one pass after the other."""

    def __init__(self, pass_ms: float, row_ms: float) -> None:
        self._pass_ms, self._row_ms = pass_ms, row_ms
        self._free_at = 0.0

    def seconds(self, rows: int) -> float:
        """How long a pass over so many positions takes."""
        size = next((size for size in SIZES if size >= rows), -(-rows // LARGE_STEP) * LARGE_STEP)
        return 1e-3 * (self._pass_ms + self._row_ms * size)

    def start(self, output: ForwardOutput, rows: int) -> PendingPass:
        """A pass with this result, which is ready when those before it and its own time are over."""
        self._free_at = max(NOW(), self._free_at) + self.seconds(rows)
        return SimulatedPass(output, self._free_at)
