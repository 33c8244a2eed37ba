"""The Python code of the documents runs: with a tiny model in every test run, with the default model in slow ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftwood.targets import Loaded, tiny_target
from draftwood.text import ByteTokenizer
from tests.tools.documents import WRITTEN, blocks
from tests.tools.paths import ROOT
from tests.tools.serve import serving

PAGES = [path for path in WRITTEN if any(block.language == "python" for block in blocks(path))]
LOCAL = [path for path in PAGES if path.name != "serving.md"]  # its client needs a server

each_page = pytest.mark.parametrize("page", LOCAL, ids=lambda path: str(path.relative_to(ROOT)))


def run(page: Path, replacements: dict[str, str] | None = None) -> None:
    """Run the blocks of a page one after another in one namespace."""
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python":
            code = block.text
            for old, new in (replacements or {}).items():
                code = code.replace(old, new)
            exec(compile("\n" * block.line + code, str(page), "exec", dont_inherit=True), names)


@each_page
def test_python_code_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftwood.llm.load_target", lambda *_, **__: Loaded(tiny_target(), ByteTokenizer()))
    run(page)


@pytest.mark.slow
@pytest.mark.model
@each_page
def test_python_code_runs_with_the_default_model(page: Path) -> None:
    run(page)


def test_client_of_the_serving_page_runs_against_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        run(ROOT / "docs" / "serving.md", {"http://127.0.0.1:8000": server.url, "smollm2": "tiny"})
    assert capsys.readouterr().out
