"""Reports of benchmark runs: Markdown, one HTML page, and the figures as JSON."""

from draftwood.bench.report.html import html_report
from draftwood.bench.report.markdown import markdown_report
from draftwood.bench.report.write import summary_json, write_report

__all__ = ["html_report", "markdown_report", "summary_json", "write_report"]
