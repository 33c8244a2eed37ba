"""Shared by commands that measure something: the prompts to measure on, and the plot of the result."""

from collections.abc import Sequence
from pathlib import Path

from draftwood.bench.tasks import load_tasks
from draftwood.errors import OptionError
from draftwood.plots import Drawing, svg_file
from draftwood.prompts import Conversation, read_prompts


def measured_prompts(path: str | None, limit: int | None, of_a_task: int | None = None) -> list[Conversation]:
    """The first ``limit`` prompts of a file, or of every bundled task; without a limit the whole file, or ``of_a_task``
    prompts of every task."""
    if path:
        return read_prompts(path, limit)
    tasks = load_tasks([], None, of_a_task if limit is None else limit)
    return [[{"role": "user", "content": prompt.turns[0]}] for task in tasks for prompt in task.prompts]


def check_plot(path: str | None) -> None:
    """Raise for a file that a plot cannot be written to; before the measurement."""
    if path and Path(path).suffix.lower() != ".svg":
        raise OptionError("The plot must be an .svg file", got=path)


def write_plot(path: str, title: str, panels: Sequence[Drawing]) -> None:
    try:
        Path(path).write_text(svg_file(title, panels), encoding="utf-8")
    except OSError as error:
        raise OptionError(f"The plot cannot be written to {path}", got=error.strerror or error) from error
