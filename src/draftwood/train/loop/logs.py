"""Logs of a run: a table on the console, JSON lines, and TensorBoard if it is installed.

The JSON log is read for the plot at the end of a run. When a run resumes, lines of repeated steps are dropped.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from draftwood.disk import parse_json
from draftwood.display import duration
from draftwood.errors import DraftwoodError, MissingExtraError

_COLUMNS = (("step", 13), ("loss", 9), ("accuracy", 9), ("lr", 9), ("norm", 8), ("tokens/s", 9), ("left", 10))

_TENSORBOARD = (  # modules without type hints
    "tensorboard.compat.proto.event_pb2",
    "tensorboard.compat.proto.summary_pb2",
    "tensorboard.summary.writer.record_writer",
)


class Log:
    """``log.jsonl`` of a run. Each line has a ``kind``: train, validate, or stop (loss or gradients not finite)."""

    def __init__(self, path: Path, from_step: int = 0) -> None:
        self.path = path
        kept = [line for line in read_log(path) if line.get("step", 0) <= from_step] if from_step else []
        self._write("".join(json.dumps(line) + "\n" for line in kept), "w")

    def add(self, kind: str, values: Mapping[str, Any]) -> None:
        self._write(json.dumps({"kind": kind, **values}) + "\n", "a")

    def _write(self, text: str, mode: str) -> None:
        with _wrap_errors(self.path), self.path.open(mode, encoding="utf-8") as file:
            file.write(text)


@contextmanager
def _wrap_errors(path: Path) -> Iterator[None]:
    """Raise OSError, such as a full disk, as DraftwoodError."""
    try:
        yield
    except OSError as error:
        raise DraftwoodError(f"{path} cannot be written", got=error, next_step="Free some space.") from error


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a log. Skip a line that was truncated when the run was killed."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        try:
            line = parse_json(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            lines.append(line)
    return lines


class Board:
    """TensorBoard log. ``choice``: "on" requires TensorBoard, "auto" uses it if it is installed, "off".

    Events are written synchronously: TensorBoard's own writer thread prints a stack trace if the disk is full.
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
        self._path = folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"  # a new file after each resume
        with _wrap_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._write(file_version="brain.Event:2")

    def add(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._formats is not None:
            _, summary, _ = self._formats
            found = [summary.Value(tag=f"{kind}/{name}", simple_value=each) for name, each in _flatten(values).items()]
            self._write(step=values.get("step", 0), summary=summary(value=found))

    def _write(self, **fields: Any) -> None:
        assert self._formats is not None
        event, _, writer = self._formats
        with _wrap_errors(self._path), self._path.open("ab") as file:
            writer(file).write(event(wall_time=time.time(), **fields).SerializeToString())


class Console:
    """Table of steps on stderr. On a terminal the last line shows the current step."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._live = not quiet and self._stream.isatty()
        self._clear = "\r\x1b[K" if self._live else ""
        self._rows = 0
        self._drawn = 0.0

    def note(self, text: str) -> None:
        self._write_line(text)

    def note_unbuffered(self, text: str) -> None:
        """Print from a signal handler, bytransient the buffer, since the handler may interrupt a write."""
        if not self._quiet:
            with suppress(OSError):  # a stream without a file descriptor
                os.write(self._stream.fileno(), f"{self._clear}{text}\n".encode())

    def progress(self, label: str, done: int, total: int) -> None:
        """Show progress (see ``draftwood.progress.Progress``), only on a terminal."""
        now = time.monotonic()
        if self._live and (done >= total or now - self._drawn > 0.1):
            self._drawn = now
            self._write(f"\r\x1b[K{label}: {done:,} of {total:,}")
            if done >= total:
                self._write("\r\x1b[K")

    def step(self, values: Mapping[str, Any], *, transient: bool = False) -> None:
        """Print a row. A ``transient`` row is replaced by the next one."""
        cells = [_format_cell(values, name) for name, _ in _COLUMNS]
        text = "  ".join(f"{cell:>{size}}" for cell, (_, size) in zip(cells, _COLUMNS, strict=True))
        if transient:
            if self._live:
                self._write(f"\r\x1b[K{text}")
            return
        if self._rows % 40 == 0:
            self._write_line("  ".join(f"{name:>{size}}" for name, size in _COLUMNS))
        self._rows += 1
        self._write_line(text)

    def _write_line(self, text: str) -> None:
        if not self._quiet:
            self._write(f"{self._clear}{text}\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _format_cell(values: Mapping[str, Any], name: str) -> str:
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


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return numbers by their path."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and name != "step":
            found[prefix + name] = float(value)
    return found
