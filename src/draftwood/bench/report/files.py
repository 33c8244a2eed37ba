"""Writes the report files, each atomically."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from draftwood.bench.figures import Cell, Interval, Summary
from draftwood.bench.records import FORMAT, MANIFEST, REQUESTS, VERSION
from draftwood.bench.report.html import html_report
from draftwood.bench.report.markdown import markdown_report
from draftwood.disk import new_file
from draftwood.errors import DraftwoodError

MARKDOWN, PAGE, SUMMARY = "report.md", "report.html", "summary.json"


def write_report(folder: Path, summaries: Sequence[Summary]) -> list[Path]:
    """Write report.md, report.html and summary.json into the folder; return their paths."""
    if not summaries:
        raise DraftwoodError(
            "There is nothing to report", next_step="Give a folder that draftwood bench --out created."
        )
    if folder.is_file():
        raise DraftwoodError("The report folder is a file", got=str(folder))
    has_requests = all((folder / name).exists() for name in (MANIFEST, REQUESTS))
    contents = {
        MARKDOWN: markdown_report(summaries),
        PAGE: html_report(summaries, link_requests=has_requests),
        SUMMARY: format_summary_json(summaries),
    }
    written = []
    for name, content in contents.items():
        with new_file(folder / name) as temporary:
            temporary.write_text(content, encoding="utf-8")
        written.append(folder / name)
    return written


def format_summary_json(summaries: Sequence[Summary]) -> str:
    """Format the figures as JSON; NaN and infinity become null."""
    content = {"format": f"{FORMAT}-summary", "version": VERSION, "summaries": [_summary(one) for one in summaries]}
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _summary(summary: Summary) -> dict[str, Any]:
    plain = {f.name: to_json_value(getattr(summary, f.name)) for f in fields(Summary) if f.name != "cells"}
    cells: dict[str, dict[str, Any]] = {}
    for (method, task), cell in summary.cells.items():
        figures = {
            f.name: to_json_value(getattr(cell, f.name)) for f in fields(Cell) if f.name not in ("method", "task")
        }
        cells.setdefault(method, {})[task] = figures
    return {**plain, "cells": cells}


def to_json_value(value: Any) -> Any:
    """Convert records, intervals and lists to JSON values; NaN and infinity become None."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json_value(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Interval):
        return {name: to_json_value(figure) for name, figure in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): to_json_value(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [to_json_value(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
