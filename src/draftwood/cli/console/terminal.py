"""Terminal output: colours, escaping of control characters, a progress bar."""

import os
import re
import shutil
import sys
import time
import unicodedata
from collections.abc import Sequence
from typing import TextIO

from draftwood.display import duration

CLEAR_LINE = "\r\x1b[K"
BOLD, DIM, RED, GREEN = "1", "2", "31", "32"
BONUS_SOURCE, ROOT_SOURCE = "target", "root"  # as in the engine and the tree; repeated here to avoid importing torch
BAR_WIDTH = 24
REDRAW_SECONDS = 0.1
LINE_SECONDS = 60.0
MIN_SECONDS = 2.0  # before the first estimate of the remaining time

# Colours that are readable on dark and light backgrounds. Known sources have a fixed colour.
_KNOWN = {"context": 73, "suffix": 73, "corpus": 140, "transition": 179, "ngram": 108, "datastore": 140}
_KNOWN |= {"pool": 110, "window": 174, "position": 168, "head": 75}
_OTHERS = (137, 67, 132, 101, 145, 97)

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # except tab and newline


def first_source(source: str) -> str:
    """Several sources of one token are joined by "+"."""
    return source.partition("+")[0]


class Paint:
    """Colours the text of one stream, if enabled."""

    def __init__(self, choice: str, stream: TextIO) -> None:
        self.stream = stream
        self.is_terminal = stream.isatty()
        allowed = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self.enabled = choice == "always" or (choice == "auto" and self.is_terminal and allowed)
        self._seen: list[str] = []  # sources without a fixed colour, in order

    def __call__(self, text: str, *styles: str) -> str:
        return f"\x1b[{';'.join(styles)}m{text}\x1b[0m" if self.enabled and styles and text else text

    def source(self, text: str, source: str) -> str:
        """Colour text by its draft source, the first one if there are several. Tokens of the target stay uncoloured."""
        if source in (BONUS_SOURCE, ROOT_SOURCE):
            return text
        source = first_source(source)
        if source not in _KNOWN and source not in self._seen:
            self._seen.append(source)
        colour = _KNOWN.get(source) or _OTHERS[self._seen.index(source) % len(_OTHERS)]
        return self(text, f"38;5;{colour}")

    def write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()


class Screen:
    """Output of a command: answers to stdout, everything else to stderr."""

    def __init__(self, colour: str, *, quiet: bool = False) -> None:
        """``quiet``: print answers only."""
        self.out = Paint(colour, sys.stdout)
        self.err = Paint(colour, sys.stderr)
        self.progress = ProgressBar(self.err, hidden=quiet)
        self._quiet = quiet

    def note(self, text: str) -> None:
        """Print a message to stderr."""
        self.note_painted(self.err(text, DIM))

    def note_painted(self, text: str) -> None:
        """Print a message that has its own colours to stderr."""
        if text and not self._quiet:
            self.out.stream.flush()
            self.err.write(text + "\n")

    def answer(self, texts: Sequence[str], sources: Sequence[str]) -> None:
        """Print model output. On a terminal, replace control characters."""
        safe = [replace_controls(text) for text in texts] if self.out.is_terminal else texts
        self.out.write("".join(self.out.source(text, source) for text, source in zip(safe, sources, strict=True)))


class ProgressBar:
    """``progress(label, done, total)``: on a terminal a bar with the remaining time, otherwise one line per label and
    one per minute."""

    def __init__(self, paint: Paint, *, hidden: bool = False) -> None:
        self._paint = paint
        self._hidden = hidden
        self._label = ""
        self._began = (0.0, 0)  # time and progress at the start of this label
        self._drawn = 0.0

    def __call__(self, label: str, done: int, total: int) -> None:
        if self._hidden:
            return
        now = time.monotonic()
        new, self._label = label != self._label, label
        if new:
            self._began = (now, done)
        if not self._paint.is_terminal:
            self._write_line(label, done, total, now, new=new)
        elif done >= total > 0:
            self.clear()
        elif new or now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            self._paint.write(CLEAR_LINE + self._format_bar(label, done, total, now))

    def clear(self) -> None:
        if self._paint.is_terminal and self._drawn:
            self._paint.write(CLEAR_LINE)
            self._drawn = 0.0

    def _write_line(self, label: str, done: int, total: int, now: float, *, new: bool) -> None:
        if new:
            self._drawn = now
            self._paint.write(f"{label}\n")
        elif done < total and now - self._drawn >= LINE_SECONDS:
            self._drawn = now
            self._paint.write(f"{label}: {done / total:.0%}{self._format_time_left(done, total, now)}\n")

    def _format_bar(self, label: str, done: int, total: int, now: float) -> str:
        """Format the bar to fit into one line: `CLEAR_LINE` cannot clear a second one."""
        room = columns() - len(" 100%  ") - 1
        size = max(0, min(BAR_WIDTH, room - BAR_WIDTH))
        share = done / max(total, 1)
        full = round(share * size)
        bar = self._paint("━" * full, "38;5;73") + self._paint("━" * (size - full), DIM)
        text = label + self._format_time_left(done, total, now)
        return f"{bar} {share:4.0%}  {text[: max(0, room - size)]}"

    def _format_time_left(self, done: int, total: int, now: float) -> str:
        """Estimate the remaining time. Empty until there is enough progress."""
        since, at_first = self._began
        if done <= at_first or now - since < MIN_SECONDS:
            return ""
        return f", {duration((now - since) * (total - done) / (done - at_first))} left"


def columns() -> int:
    return shutil.get_terminal_size().columns


def replace_controls(text: str) -> str:
    """Replace control characters, which could move the cursor or change colours."""
    return _CONTROL.sub("\ufffd", text)


def quote(text: str) -> str:
    """Quote a token and escape unprintable characters."""
    return "'" + "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text) + "'"


def width(text: str) -> int:
    """Return the number of columns: wide characters take two, combining marks none."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )
