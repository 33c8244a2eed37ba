"""Documents that cannot drift: links, anchors, commands, generated parts, layout; and facts that reports state."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from draftwood.bench.peers import Peer, PeerModel, PeerSpec
from draftwood.bench.recipes.recipe import list_recipes, load_recipe
from draftwood.bench.report import text
from draftwood.cli.main import build_parser, parse
from tests.tools.documents import DOCUMENTS, WRITTEN, anchors, blocks, command_lines, links, prose
from tests.tools.paths import ROOT

MAX_LINE = 120
MAX_CELL = 220  # characters of a table cell: longer texts are paragraphs
LANGUAGES = {"console", "python", "text", "toml", "layers"}

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
each_written = pytest.mark.parametrize("document", WRITTEN, ids=lambda path: str(path.relative_to(ROOT)))


def test_facts_of_a_peer_come_from_its_worker_without_the_message_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTWOOD_PEER_FAKE", sys.executable)
    worker = tmp_path / "fake_worker.py"
    worker.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    print(json.dumps({'id': json.loads(line)['id'], 'version': '1'}), flush=True)\n"
    )
    spec = PeerSpec(name="fake", engine="fake", title="a fake", packages=("json",), worker=worker)
    with Peer(spec, PeerModel(folder=tmp_path)) as peer:
        assert peer.facts == {"version": "1"}


def test_memory_is_formatted_in_bytes() -> None:
    assert [text.memory(value) for value in (None, 3 << 20, 5 << 29)] == [text.NOTHING, "3 MiB", "2.50 GiB"]


@pytest.mark.parametrize("name", list_recipes())
def test_scripts_named_by_recipes_exist(name: str) -> None:
    recipe = load_recipe(name)
    for script in re.findall(r"python (\S+\.py)", f"{recipe.then} {recipe.command}"):
        assert (ROOT / script).is_file()


def test_generated_parts_are_up_to_date() -> None:
    """If this fails, run ``python docs/generate.py``."""
    command = [sys.executable, ROOT / "docs" / "generate.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    navigation = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(navigation) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))


@pytest.mark.slow
def test_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@each_document
def test_links_and_scripts_exist(document: Path) -> None:
    for line, link in links(document):
        file, _, anchor = link.partition("#")
        target = (document.parent / file).resolve() if file else document
        assert target.exists(), f"line {line}: {link}"
        assert not anchor or anchor in anchors(target), f"line {line}: {link}"
    for script in re.findall(r"python (benchmarks/\S+\.py)", document.read_text(encoding="utf-8")):
        assert (ROOT / script).is_file(), script


@each_written
def test_lines_and_table_cells_are_short(document: Path) -> None:
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        is_table = line.startswith("|")
        assert is_table or len(line) <= MAX_LINE or "://" in line, f"line {number} has {len(line)} characters"
        cells = re.split(r"(?<!\\)\|", line) if is_table else []
        assert max(map(len, cells), default=0) <= MAX_CELL, f"line {number} has a paragraph in a table cell"


@each_written
def test_code_blocks_name_their_language(document: Path) -> None:
    for block in blocks(document):
        assert block.language in LANGUAGES, f"line {block.line}: {block.language!r}"


@each_written
def test_commands_of_code_blocks_parse(document: Path) -> None:
    for line, command in command_lines(document):
        try:
            parse(shlex.split(command)[1:])
        except SystemExit:
            pytest.fail(f"line {line}: {command}")


@each_document
def test_commands_in_sentences_are_known(document: Path) -> None:
    for line, content in prose(document):
        for command in re.findall(r"`draftwood ([a-z][^`]*)`", content):
            words = command.split()
            parser = find_parser(build_parser(), words)
            assert parser is not None, f"line {line}: draftwood {command}"
            used = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert used <= set(parser._option_string_actions), f"line {line}: draftwood {command}"


def find_parser(parser: argparse.ArgumentParser, words: list[str]) -> argparse.ArgumentParser | None:
    """The parser of the command that the words name; None if there is no such command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and words and not words[0].startswith("-"):
            if words[0] in action.choices:
                return find_parser(action.choices[words[0]], words[1:])
            return parser if parser.get_default("run") is not None else None
    return parser
