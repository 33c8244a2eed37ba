"""Prompts for training data: files in every layout, invalid lines and settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftwood.errors import OptionError, PromptError
from draftwood.train.data.prompts import read_sources
from draftwood.train.data_settings import DataSettings
from tests.tools.train_data import CHAT, assistant, lines, user


def test_all_layouts_give_the_same_prompts(tmp_path: Path) -> None:
    said = [("user", "human", "one"), ("assistant", "gpt", "no"), ("user", "human", "two")]
    rows = [
        {"turns": ["one", "two"], "id": 7},
        {"messages": [{"role": role, "content": text} for role, _, text in said]},
        {"conversations": [{"from": name, "value": text} for _, name, text in said]},
    ]
    path = lines(tmp_path / "a.jsonl", *rows)
    (tmp_path / "b.json").write_text(json.dumps(rows))
    (tmp_path / "c.txt").write_bytes("\ufeffone\r\n\n  two \x85 three\n".encode())
    prompts, sources = read_sources([path, str(tmp_path / "b.json"), str(tmp_path / "c.txt")])
    assert [list(prompt.messages) for prompt in prompts[:6]] == [[user("one"), user("two")]] * 6
    assert [list(prompt.messages) for prompt in prompts[6:]] == [[user("one")], [user("two \x85 three")]]
    assert [prompt.place for prompt in prompts[2:4]] == [f"{path}, line 3", f"{tmp_path / 'b.json'}, entry 1"]
    assert [(source.name, source.prompts) for source in sources] == [("a.jsonl", 3), ("b.json", 3), ("c.txt", 2)]
    assert len({source.sha256 for source in sources}) == 3


def test_system_message_stays_first(tmp_path: Path) -> None:
    rules = {"role": "system", "content": "Rhyme."}
    path = lines(tmp_path / "a.jsonl", {"messages": [rules, assistant("Hi."), user("Go.")]})
    assert read_sources([path])[0][0].messages == (rules, user("Go."))


def test_unusable_conversations_are_skipped_and_counted(tmp_path: Path) -> None:
    rows: list[Any] = [{"turns": turns} for turns in (["fine"], [], [" "], ["fine", ""])]
    path = lines(tmp_path / "a.jsonl", *rows, {"messages": [assistant("I say.")]}, {"messages": [*CHAT[:3]]})
    prompts, (source,) = read_sources([path])
    assert (len(prompts), source.prompts, source.skipped) == (2, 2, 4)
    kept, (source,) = read_sources([path], keep_answers=True)
    assert [prompt.messages for prompt in kept] == [CHAT[:2]]  # up to the last answer
    assert source.skipped == 5


def test_a_limit_counts_over_all_files(tmp_path: Path) -> None:
    paths = [lines(tmp_path / name, {"turns": ["a"]}, {"turns": ["b"]}) for name in ("a.jsonl", "b.jsonl", "c.jsonl")]
    prompts, sources = read_sources(paths, limit=3)
    assert len(prompts) == 3
    assert [source.prompts for source in sources] == [2, 1, 0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"{", "line 2 is not valid JSON"),
        (b"[" * 100_000, "line 2 is not valid JSON"),
        (b"\xff", "line 2 is not UTF-8 text"),
        (b'{"title": "a"}', "line 2 has no prompt"),
        (b"[1]", "line 2 has no prompt"),
        (b'{"turns": ["a", 5]}', "line 2 has no prompt"),
        (b'{"turns": "a"}', "line 2 has no prompt"),
        (b'{"messages": ["a"]}', "line 2 has a message without 'role' and 'content'"),
        (b'{"conversations": [{"from": "human"}]}', "line 2 has a message without 'from' and 'value'"),
        (b'{"messages": [{"role": "tool", "content": "a"}]}', "line 2 has a message with an unknown role"),
        (b'{"turns": ["half a letter \\ud83d"]}', "line 2 is not valid Unicode"),
    ],
)
def test_malformed_lines_are_refused_with_line_number(line: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"turns": ["fine"]}\n' + line)
    with pytest.raises(PromptError, match=expected) as refusal:
        read_sources([str(path)])
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(("name", "content"), [("a.jsonl", ""), ("a.txt", " \n\n"), ("a.json", "[]")])
def test_files_without_prompts_are_refused(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(PromptError, match="has no prompts"):
        read_sources([str(tmp_path / name)])


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"none\.txt cannot be read"):
        read_sources([str(tmp_path / "none.txt")])
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(PromptError, match="is not a list"):
        read_sources([str(tmp_path / "a.json")])


@pytest.mark.parametrize(
    "options",
    [
        {"files": ()},
        {"keep_answers": True, "files": (), "self_made": 1},
        {"limit": 0},
        {"max_length": 0},
        {"batch": 0},
        {"shard_size": 1.5},
        {"seed": -1},
        {"self_made": -1},
        {"max_tokens": 0},
        {"temperature": -1.0},
        {"top_p": 0.0},
        {"prompt_temperature": 0.0},
    ],
)
def test_invalid_settings_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        DataSettings(**{"files": ("a",), **options})
