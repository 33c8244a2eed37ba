"""``benchmarks/exactness.py`` on the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.script import load_script

FAST = ["--model", "tiny", "--max-tokens", "6", "--device", "cpu", "--dtype", "float32"]


def test_answers_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("exactness")
    for name, count in (("one", 3), ("two", 1)):
        lines = [json.dumps({"id": f"{name}{number}", "turns": [f"{name} {number} {name}"]}) for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert script.main(["plain@2", "goose:budget=4@3", "--data", str(tmp_path), *FAST]) == 0
    rows = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["| plain@2", "4 of 4"], ["| goose:budget=4@3", "4 of 4"]]


def test_differences_are_named() -> None:
    assert list(load_script("exactness").differing([[1, 2], [1, 2], [1]], [[1, 2], [1, 3], [1, 2]])) == ["1:1", "2:1"]
