"""What all commands share: options, loading, terminal output."""

from draftwood.cli.console.answer import Answer, all_answers
from draftwood.cli.console.loading import budget_text, dtype_name, facts, load_llm
from draftwood.cli.console.pace import PaceBar
from draftwood.cli.console.report import (
    SEPARATOR,
    closing,
    comparison_line,
    counted,
    legend,
    logprob_lines,
    show,
    stats_line,
    table,
)
from draftwood.cli.console.stdin import piped_lines, read_prompt, typed_lines
from draftwood.cli.console.terminal import BOLD, BONUS_SOURCE, DIM, GREEN, RED, Paint, Screen, columns, quoted, width

__all__ = [
    "BOLD",
    "BONUS_SOURCE",
    "DIM",
    "GREEN",
    "RED",
    "SEPARATOR",
    "Answer",
    "PaceBar",
    "Paint",
    "Screen",
    "all_answers",
    "budget_text",
    "closing",
    "columns",
    "comparison_line",
    "counted",
    "dtype_name",
    "facts",
    "legend",
    "load_llm",
    "logprob_lines",
    "piped_lines",
    "quoted",
    "read_prompt",
    "show",
    "stats_line",
    "table",
    "typed_lines",
    "width",
]
