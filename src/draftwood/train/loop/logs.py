"""What a run says: a table on the console, a line of JSON for everything, TensorBoard where it is installed.

A log is read again when a run ends, for the plot, and when it goes on: lines of steps that are done anew are dropped.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from draftwood.display import duration
from draftwood.errors import DraftwoodError, MissingExtraError

_COLUMNS = (("step", 13), ("loss", 9), ("accuracy", 9), ("lr", 9), ("norm", 8), ("tokens/s", 9), ("left", 10))

_TENSORBOARD = (  # its own modules, which have no types
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary.writer.record_writer",
)


class Log:
    """``log.jsonl`` of a run. Lines have a ``kind``: train, validate, or stop where a step was no number."""

    def __init__(self, path: Path, from_step: int = 0) -> None:
        self.path = path
        kept = [line for line in read_log(path) if line.get("step", 0) <= from_step] if from_step else []
        self._write("".join(json.dumps(line) + "\n" for line in kept), "w")

    def add(self, kind: str, values: Mapping[str, Any]) -> None:
        self._write(json.dumps({"kind": kind, **values}) + "\n", "a")

    def _write(self, text: str, mode: str) -> None:
        with _told(self.path), self.path.open(mode, encoding="utf-8") as file:
            file.write(text)


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """A full disk is no mistake of the program."""
    try:
        yield
    except OSError as error:
        raise DraftwoodError(f"{path} cannot be written", got=error, next_step="Free some space.") from error


def read_log(path: Path) -> list[dict[str, Any]]:
    """Its lines; one that was cut off when the run was killed is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


class Board:
    """TensorBoard, or nothing. ``choice``: "on" wants it, "auto" takes it where it is installed.

    Its own writer works in a thread, whose stack trace a full disk would print; here every line is written at once.
    """

    def __init__(self, choice: str, folder: Path) -> None:
        self._formats: tuple[Any, Any, Any] | None = None
        if choice == "off":
            return
        try:
            events, summaries, records = map(import_module, _TENSORBOARD)
        except ImportError as error:
            if choice == "on":
                raise MissingExtraError("TensorBoard", "tensorboard", "train") from error
            return
        self._formats = events.Event, summaries.Summary, records.RecordWriter
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"  # a new one whenever a run goes on
        with _told(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._write(file_version="brain.Event:2")

    def add(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._formats is not None:
            _, summary, _ = self._formats
            found = [summary.Value(tag=f"{kind}/{name}", simple_value=each) for name, each in _flat(values).items()]
            self._write(step=values.get("step", 0), summary=summary(value=found))

    def _write(self, **fields: Any) -> None:
        assert self._formats is not None
        event, _, writer = self._formats
        with _told(self._path), self._path.open("ab") as file:
            writer(file).write(event(wall_time=time.time(), **fields).SerializeToString())


class Console:
    """A table of steps on stderr; on a terminal its last line is the step under way."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._live = not quiet and self._stream.isatty()
        self._clear = "\r\x1b[K" if self._live else ""
        self._rows = 0
        self._drawn = 0.0

    def note(self, text: str) -> None:
        self._line(text)

    def note_at_once(self, text: str) -> None:
        """From a signal handler, which may have come into the middle of a write: past the stream's buffer."""
        if not self._quiet:
            with suppress(OSError):  # a stream of a test has no file
                os.write(self._stream.fileno(), f"{self._clear}{text}\n".encode())

    def progress(self, label: str, done: int, total: int) -> None:
        """As ``draftwood.progress.Progress``; only on a terminal."""
        now = time.monotonic()
        if self._live and (done >= total or now - self._drawn > 0.1):
            self._drawn = now
            self._write(f"\r\x1b[K{label}: {done:,} of {total:,}")
            if done >= total:
                self._write("\r\x1b[K")

    def step(self, values: Mapping[str, Any], *, passing: bool = False) -> None:
        """``passing``: the line is replaced by the next one."""
        cells = [_cell(values, name) for name, _ in _COLUMNS]
        text = "  ".join(f"{cell:>{size}}" for cell, (_, size) in zip(cells, _COLUMNS, strict=True))
        if passing:
            if self._live:
                self._write(f"\r\x1b[K{text}")
            return
        if self._rows % 40 == 0:
            self._line("  ".join(f"{name:>{size}}" for name, size in _COLUMNS))
        self._rows += 1
        self._line(text)

    def _line(self, text: str) -> None:
        if not self._quiet:
            self._write(f"{self._clear}{text}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _cell(values: Mapping[str, Any], name: str) -> str:
    if name == "step":
        return f"{values['step']}/{values['steps']}"
    if name == "left":
        return duration(values["left"]) if "left" in values else ""
    if name == "tokens/s":
        return f"{values['tokens_per_second']:,.0f}"
    value = values.get({"norm": "gradient_norm"}.get(name, name))
    if value is None and name == "accuracy":
        value = next((v for key, v in values.get("parts", {}).items() if "acc" in key), None)
    if value is None:
        return ""
    return f"{value:.2e}" if name == "lr" else f"{value:.4f}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Numbers by the path to them."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step":
            found[prefix + name] = float(value)
    return found
