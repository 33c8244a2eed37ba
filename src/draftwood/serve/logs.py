"""Logs: no message repeats without bound, and requests are logged without their texts."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from time import monotonic
from typing import Any

LOG = logging.getLogger("draftwood.serve")
LIMITED_LOGS = ("draftwood.serve", "uvicorn.error", "asyncio")
MAX_REPEATS = 5  # of one message in each period
PERIOD_SECONDS = 60.0
MAX_MESSAGES = 1000  # different messages to remember


class RepeatFilter(logging.Filter):
    """Passes each message a few times per minute. The next one that passes says how many did not."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[str, tuple[float, int]] = {}  # by message: start of its period and count since then

    def filter(self, record: logging.LogRecord) -> bool:
        key, now = f"{record.name} {record.msg}"[:80], monotonic()  # before its arguments are filled in
        start, count = self._seen.get(key, (now, 0))
        if now - start > PERIOD_SECONDS:
            if count > MAX_REPEATS:
                record.msg = f"{record.msg} ({count - MAX_REPEATS} more in the last minutes)"
            start, count = now, 0
        if len(self._seen) >= MAX_MESSAGES:
            self._seen.clear()
        self._seen[key] = start, count + 1
        return count < MAX_REPEATS


@contextmanager
def limit_repeats() -> Iterator[None]:
    repeats = RepeatFilter()
    loggers = [logging.getLogger(name) for name in LIMITED_LOGS]
    for logger in loggers:
        logger.addFilter(repeats)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(repeats)


class RequestLog:
    """One line of JSON per response: numbers and names, no texts. ``path``: a file, or "-" for standard error."""

    def __init__(self, path: str | None) -> None:
        self._handler: logging.Handler | None = None
        if path is not None:  # a file that log rotation moves away is opened again
            self._handler = logging.StreamHandler() if path == "-" else WatchedFileHandler(path, encoding="utf-8")

    def write(self, entry: Mapping[str, Any]) -> None:
        if self._handler is not None:
            line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), **entry})
            self._handler.emit(logging.LogRecord(LOG.name, logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        if self._handler is not None:
            self._handler.close()
