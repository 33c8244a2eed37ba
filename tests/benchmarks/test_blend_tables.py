"""The script that compares drafters by task: what it reads, what it keeps, what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.script import load_script


def test_answers_are_kept_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("blend_tables")
    for name, skipped in (("one", "abc"), ("two", "none")):
        lines = [{"turns": [turn], "category": kind} for turn, kind in (("abc", "a"), ("xyxyxy", "a"), ("q q", "b"))]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
        (tmp_path / "fitted").mkdir(exist_ok=True)
        (tmp_path / "fitted" / f"{name}.jsonl").write_text(json.dumps({"turns": [skipped]}))
    results = tmp_path / "runs.jsonl"
    where = ["--data", str(tmp_path), "--skip", str(tmp_path / "fitted"), "--results", str(results)]
    args = [*where, "--model", "tiny", "--tasks", "one,two/b", "--max-tokens", "12", "goose@6", "blend@6"]
    assert script.main(args) == 0
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row[0][:3] for row in rows] == [
        [method, task, number]
        for task, number in (("one", 0), ("two/b", 0), ("one", 1))
        for method in ("goose@6", "blend@6")
    ]
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("| tokens per pass | one | two/b | mean | ratio |")
    assert "| 1.000 ± 0.000 |" in table[2]
    assert script.main(args) == 0
    assert len(results.read_text().splitlines()) == len(rows)  # nothing is computed twice
    assert capsys.readouterr().out.splitlines() == table
