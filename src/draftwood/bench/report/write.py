"""The report of runs as files: each whole or not there."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from draftwood.bench.records import FORMAT, MANIFEST, REQUESTS, VERSION, Run
from draftwood.bench.report.html import html_report
from draftwood.bench.report.markdown import markdown_report
from draftwood.bench.summary import Cell, Interval, Summary
from draftwood.errors import DraftwoodError
from draftwood.files import new_file

MARKDOWN, PAGE, SUMMARY = "report.md", "report.html", "summary.json"


def write_report(folder: Path, runs: Sequence[Run]) -> list[Path]:
    """Writes report.md, report.html and summary.json of the runs into the folder; says where they are."""
    from draftwood.bench.metrics import summarise  # the figures; a page of ready summaries needs none of it

    if not runs:
        raise DraftwoodError("There is nothing to report on", next_step="Name a folder that --out made.")
    summaries = summarise(runs)
    beside = all((folder / name).exists() for name in (MANIFEST, REQUESTS))
    contents = {
        MARKDOWN: markdown_report(summaries),
        PAGE: html_report(summaries, requests_beside=beside),
        SUMMARY: summary_json(summaries),
    }
    written = []
    for name, content in contents.items():
        with new_file(folder / name) as temporary:
            temporary.write_text(content, encoding="utf-8")
        written.append(folder / name)
    return written


def summary_json(summaries: Sequence[Summary]) -> str:
    """The figures for programs; what is no number (NaN, infinite) is null."""
    content = {"format": f"{FORMAT}-summary", "version": VERSION, "summaries": [_summary(one) for one in summaries]}
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _summary(summary: Summary) -> dict[str, Any]:
    plain = {f.name: _plain(getattr(summary, f.name)) for f in fields(Summary) if f.name != "cells"}
    cells: dict[str, dict[str, Any]] = {}
    for (method, task), cell in summary.cells.items():
        figures = {f.name: _plain(getattr(cell, f.name)) for f in fields(Cell) if f.name not in ("method", "task")}
        cells.setdefault(method, {})[task] = figures
    return {**plain, "cells": cells}


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return {name: _plain(figure) for name, figure in value._asdict().items()}
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
