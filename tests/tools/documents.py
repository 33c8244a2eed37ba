"""Read the project's documents: their code blocks, links and headings."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.tools.paths import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
WRITTEN = [path for path in DOCUMENTS if path.name != "report.md"]  # reports are output of `draftwood bench`


class Block(NamedTuple):
    language: str
    line: int  # of the opening fence
    text: str


def blocks(path: Path) -> Iterator[Block]:
    """The fenced code blocks of a document."""
    start, language, inside = 0, "", []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```") and not start:
            start, language, inside = number, line[3:].strip(), []
        elif line.startswith("```"):
            yield Block(language, start, "\n".join(inside) + "\n")
            start = 0
        elif start:
            inside.append(line)


def prose(path: Path) -> list[tuple[int, str]]:
    """The numbered lines outside code blocks."""
    found, fenced = [], False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            found.append((number, line))
    return found


def links(path: Path) -> Iterator[tuple[int, str]]:
    """The targets of links and images, those of other hosts left out."""
    for number, line in prose(path):
        for link in re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)", re.sub(r"`[^`]*`", "", line)):
            target = link[0] or link[1]
            if "://" not in target:
                yield number, target


def anchors(path: Path) -> set[str]:
    """The anchors of a document's headings, as MkDocs makes them."""
    found: set[str] = set()
    for _, line in prose(path):
        if match := re.match(r"#+ (.*)", line):
            title = unicodedata.normalize("NFKD", match[1].replace("`", "")).encode("ascii", "ignore").decode()
            slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())
            found.add(slug if slug not in found else f"{slug}_1")
    return found


def command_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The ``draftwood`` commands of console blocks, continued lines joined, comments removed, variables set."""
    for block in blocks(path):
        if block.language == "console":
            for line in block.text.replace("\\\n", "").splitlines():
                command = re.split(r"\s+#\s", line.strip().removeprefix("$ "))[0].strip().removesuffix("&")
                if command.startswith("draftwood "):
                    yield block.line, re.sub(r"\$\w+", "1", command)
