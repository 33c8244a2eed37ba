"""The report as Markdown."""

import re
from collections.abc import Iterator, Sequence

from draftwood.bench.figures import Summary
from draftwood.bench.report.facts import command, facts, headline, warnings
from draftwood.bench.report.sections import sections
from draftwood.bench.report.tables import Entry, Section, Table

_SPECIAL = re.compile(r"([\\`*\[\]|~])|(?<!\w)(_)|(_)(?!\w)")


def markdown_report(summaries: Sequence[Summary]) -> str:
    """Render every summary under its own heading."""
    blocks = [block for summary in summaries for block in _blocks(summary)]
    return "\n\n".join(blocks) + "\n"


def escape(text: str) -> str:
    """Escape text for one line of Markdown: names and messages come from outside."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(lambda found: "\\" + found.group(0), plain)


def _blocks(summary: Summary) -> Iterator[str]:
    yield f"# {escape(summary.title)}"
    yield escape(headline(summary))
    problems = warnings(summary)
    if problems:
        yield "\n".join(f"- **WARNING** {escape(problem)}" for problem in problems)
    yield "## Setup"
    yield "\n".join(f"- {escape(fact.name)}: {escape(fact.value)}" for fact in facts(summary))
    if command(summary):
        yield _code(command(summary))
    for section in sections(summary):
        yield from _section(section)


def _section(section: Section) -> Iterator[str]:
    yield f"## {escape(section.title)}"
    if section.note:
        yield escape(section.note)
    for table in section.tables:
        if len(section.tables) > 1:
            yield f"### {escape(table.caption)}"
        yield _table(table)


def _table(table: Table) -> str:
    head = "| " + " | ".join(escape(column.name) for column in table.columns) + " |"
    rule = "| " + " | ".join("---:" if column.numeric else "---" for column in table.columns) + " |"
    rows = ["| " + " | ".join(_entry(entry) for entry in row) + " |" for row in table.rows]
    return "\n".join([head, rule, *rows])


def _entry(entry: Entry) -> str:
    return f"**{escape(entry.text)}**" if entry.alert else escape(entry.text)


def _code(text: str) -> str:
    """Render a code block with a fence longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
