"""``benchmarks/head_prompts.py``: prompts of all kinds, the same for the same seed."""

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
    questions = [prompt for prompt in first if "What is number " in prompt]
    assert 6 < len(questions) < len(first)  # the others ask for a summary
    for prompt in questions:
        number = prompt.partition("What is number ")[2][0]
        assert f"end{number}" in prompt
    for prompt in first:
        assert len(prompt) <= script.MAX_CHARACTERS + 1000


def test_functions_have_a_docstring_and_no_body(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    documented = SOURCE.replace("Add an item.", "Add an item to the top of the stack, which may be empty.")
    (tmp_path / "library" / "code.py").write_text(documented)
    out = tmp_path / "functions.jsonl"
    assert script.main(["functions", "--library", str(tmp_path / "library"), "--out", str(out)]) == 0
    (prompt,) = prompts_in(out)
    assert "def push(self, item):" in prompt
    assert "which may be empty" in prompt
    assert "append" not in prompt


def test_chats_have_several_turns(script: ModuleType, tmp_path: Path) -> None:
    given, out = tmp_path / "given.jsonl", tmp_path / "chats.jsonl"
    given.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in ("Why?", "x" * 1000)))
    assert script.main(["chats", str(given), "--count", "200", "--out", str(out)]) == 0
    chats = [json.loads(line)["turns"] for line in out.read_text().splitlines()]
    assert len(chats) == 200
    assert {len(turns) for turns in chats} == {2, 3}
    assert {turns[0] for turns in chats if "Why?" in turns[0] or "xx" in turns[0]} == {"Why?"}


def test_articles_are_numbered_and_one_is_asked_about(script: ModuleType, tmp_path: Path) -> None:
    given, out = tmp_path / "given.jsonl", tmp_path / "rag.jsonl"
    turns = [f"Summarize: Story {n} begins. It goes on." for n in range(9)]
    given.write_text("".join(json.dumps({"turns": [turn]}) + "\n" for turn in turns))
    assert script.main(["articles", str(given), "--count", "7", "--out", str(out)]) == 0
    prompts = prompts_in(out)
    assert len(prompts) == 7
    assert "[1] Story 0 begins. It goes on." in prompts[0]
    assert "Which passage is about the subject of this sentence: Story 1 begins." in prompts[4]


def test_errors_are_reported(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["passages", "--out", str(tmp_path / "x")]) == 2
    assert "prompt files" in capsys.readouterr().err
    assert script.main(["passages", str(tmp_path / "none"), "--out", str(tmp_path / "x")]) == 2
    assert "no such prompt file" in capsys.readouterr().err
