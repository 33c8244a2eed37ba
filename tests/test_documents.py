"""Benchmarks: facts about peers, what reports write of a machine, and commands in recipes and documents that exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from draftwood.bench.peers import Peer, PeerModel, PeerSpec
from draftwood.bench.recipes.recipe import list_recipes, load_recipe
from draftwood.bench.report import text
from draftwood.cli.main import build_parser

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = ("", "report", "diff", "recipes", "peers", "record", "replay")


def test_facts_of_a_peer_are_what_its_worker_tells_and_not_the_number_of_the_question(
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


def test_memory_is_a_number_of_bytes() -> None:
    assert [text.memory(value) for value in (None, 3 << 20, 5 << 29)] == [text.NOTHING, "3 MiB", "2.50 GiB"]


@pytest.mark.parametrize("name", list_recipes())
def test_scripts_that_recipes_name_are_there(name: str) -> None:
    recipe = load_recipe(name)
    for script in re.findall(r"python (\S+\.py)", f"{recipe.then} {recipe.command}"):
        assert (ROOT / script).is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_scripts_of_documents_are_there(document: Path) -> None:
    content = document.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", content):
        assert (document.parent / link).exists(), link
    for script in re.findall(r"python (benchmarks/\S+\.py)", content):
        assert (ROOT / script).is_file(), script


def test_options_of_benchmarks_in_documents_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    known = {command: options_of(["bench", *command.split()], capsys) for command in COMMANDS}
    for document in DOCUMENTS:
        content = document.read_text(encoding="utf-8").replace("\\\n", " ")
        for line in re.findall(r"draftwood bench ([^\n`]*)", content):
            word = line.split()[0] if line.split() else ""
            used = set(re.findall(r"(?:^|\s)(--[a-z-]+)", re.split(r"\s{2,}[#(]", line)[0]))
            assert used <= known.get(word, known[""]), f"{document.name}: {line}"


def options_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        build_parser().parse_args([*words, "--help"])
    return set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
