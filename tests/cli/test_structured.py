"""``draftwood generate`` with a schema, a regular expression or a grammar."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.tools.cli import TINY, Command, _plain_environment, draftwood_command  # noqa: F401 - fixtures


@pytest.fixture
def needs_library() -> None:
    pytest.importorskip("llguidance")


@pytest.mark.usefixtures("needs_library")
def test_answers_match(draftwood_command: Command, tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "words.lark"
    schema.write_text(json.dumps({"enum": [{"colour": "red"}, {"colour": "blue"}]}))
    grammar.write_text('start: "one" | "two"')
    for options, allowed in [
        (("--json-schema", str(schema)), {'{"colour": "red"}', '{"colour": "blue"}'}),
        (("--grammar", str(grammar)), {"one", "two"}),
        (("--regex", "yes|no"), {"yes", "no"}),
    ]:
        result = draftwood_command("generate", "hi", *options, *TINY, "--quiet", "--color", "never")
        assert (result.code, result.out.strip() in allowed) == (0, True), result
    result = draftwood_command("generate", "hi", "--json-schema", str(schema), *TINY, "--json", "--compare")
    answer = json.loads(result.out)
    assert json.loads(answer["text"])["colour"] in ("red", "blue")
    assert answer["compare"]["identical"] is True
    assert answer["finish_reason"] == "stop"


@pytest.mark.usefixtures("needs_library")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--regex", "("), "The regular expression cannot be used"),
        (("--json-schema", "FILE"), "The JSON schema cannot be used"),
        (("--json-schema", "none.json"), "none.json"),
        (("--regex", "a", "--grammar", "FILE"), "not allowed with"),
    ],
)
def test_mistakes_are_explained(
    draftwood_command: Command, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    path = tmp_path / "file"
    path.write_text("{")
    result = draftwood_command("generate", "hi", *(str(path) if o == "FILE" else o for o in options), *TINY)
    assert result.code == 2
    assert message in result.err
    assert "Traceback" not in result.err


def test_a_missing_package_is_named(draftwood_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    result = draftwood_command("generate", "hi", "--regex", "a", *TINY)
    assert result.code == 2
    assert "pip install 'draftwood[structured]'" in result.err
