"""MkDocs hook: fail the build if a page of the site loads anything from another host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

LOADS = re.compile(r"<(?:script|link|img|iframe|source|video|audio)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


def on_post_build(config: Any, **_: object) -> None:
    for page in sorted(Path(config["site_dir"]).rglob("*.html")):
        if found := LOADS.search(page.read_text(encoding="utf-8")):
            raise SystemExit(f"{page} loads from another host: {found[0]}")
