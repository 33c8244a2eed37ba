"""Reports of benchmark runs: Markdown, one HTML page, JSON, and tables for the terminal."""

from draftwood.bench.report.console import format_results, list_remarks
from draftwood.bench.report.diff_table import format_changes, summarize_hidden_changes
from draftwood.bench.report.facts import list_doubts, list_problems
from draftwood.bench.report.files import format_summary_json, to_json_value, write_report
from draftwood.bench.report.html import html_report
from draftwood.bench.report.markdown import markdown_report
