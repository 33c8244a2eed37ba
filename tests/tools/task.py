"""Shared by tests of prompt files: rows and files."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def lines(rows: Iterable[Any]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def put(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content.encode()))
    else:
        path.write_text(content, encoding="utf-8")
    return path


ONE = {"id": "a/1", "task": "a", "turns": ["What is 1 + 1?", "And 2 + 2?"], "category": "sums"}
TWO = {"id": "a/2", "task": "a", "turns": ["Ein größeres Beispiel\u2028 mit Zeilentrenner"]}
