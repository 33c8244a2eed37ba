"""``benchmarks/head_prompts.py``: prompts of both kinds, the same for the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.tools.script import load_script

SOURCE = '''
class Stack:
    """A stack."""

    def push(self, item):
        """Add an item."""
        self.items.append(item)

    def pop(self):
        return self.items.pop()

class Small:
    def only(self):
        return 1
'''


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("head_prompts")


def prompts_in(file: Path) -> list[str]:
    return [json.loads(line)["turns"][0] for line in file.read_text().splitlines()]


def test_classes_have_no_bodies(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "code.py").write_text(SOURCE)
    (tmp_path / "library" / "broken.py").write_text("class (")
    out = tmp_path / "classes.jsonl"
    assert script.main(["classes", "--library", str(tmp_path / "library"), "--out", str(out)]) == 0
    (prompt,) = prompts_in(out)
    assert "Stack" in prompt.splitlines()[0]
    assert '"""Add an item."""' in prompt
    assert "..." in prompt
    assert "append" not in prompt
    assert "Small" not in prompt


def test_passages_contain_the_context_of_their_question(script: ModuleType, tmp_path: Path) -> None:
    given = tmp_path / "given.jsonl"
    turns = [f"What is number {n}?\n\nThis is about {n}. {'x' * 250} end{n}" for n in range(6)]
    given.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in [*turns, "No context here?"]))
    outs = [tmp_path / f"{name}.jsonl" for name in ("one", "two")]
    for out in outs:
        assert script.main(["passages", str(given), "--count", "20", "--out", str(out)]) == 0
    first, second = map(prompts_in, outs)
    assert first == second
    assert len(first) > 6
    for prompt in first:
        number = prompt.partition("What is number ")[2][0]
        assert f"end{number}" in prompt
        assert len(prompt) <= script.MAX_CHARACTERS + 1000


def test_errors_are_reported(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["passages", "--out", str(tmp_path / "x")]) == 2
    assert "prompt files" in capsys.readouterr().err
    assert script.main(["passages", str(tmp_path / "none"), "--out", str(tmp_path / "x")]) == 2
    assert "no such prompt file" in capsys.readouterr().err
