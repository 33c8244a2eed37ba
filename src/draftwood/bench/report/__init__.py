"""Reports of benchmark runs: Markdown, one HTML page, the figures as JSON, and a few rows for a terminal."""

from draftwood.bench.report.changes import change_note, change_rows
from draftwood.bench.report.console import remarks, result_rows
from draftwood.bench.report.facts import troubles
from draftwood.bench.report.html import html_report
from draftwood.bench.report.markdown import markdown_report
from draftwood.bench.report.write import as_plain, summary_json, write_report

__all__ = [
    "as_plain",
    "change_note",
    "change_rows",
    "html_report",
    "markdown_report",
    "remarks",
    "result_rows",
    "summary_json",
    "troubles",
    "write_report",
]
