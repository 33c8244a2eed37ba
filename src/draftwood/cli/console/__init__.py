"""Shared by all commands: model loading, prompts, terminal output."""

from draftwood.cli.console.answer import Answer, generate_answers
from draftwood.cli.console.loading import budget_text, dtype_name, load_llm, run_info
from draftwood.cli.console.pace import PaceBar
from draftwood.cli.console.report import (
    SEPARATOR,
    comparison_line,
    explain_colours,
    legend,
    logprob_lines,
    pluralize,
    show,
    show_summary,
    speed_line,
    stats_line,
    table,
)
from draftwood.cli.console.stdin import join_lines, piped_lines, read_prompt, typed_lines
from draftwood.cli.console.terminal import BOLD, BONUS_SOURCE, DIM, GREEN, RED, Paint, Screen, columns, quote, width
