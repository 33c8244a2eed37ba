"""``benchmarks/serving.py`` and ``prediction.py`` on a tiny model: they run, and texts do not change."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tools.script import load_script

pytest.importorskip("uvicorn")


def test_server_and_library_give_same_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "serving.json"
    quick = ["--model", "tiny", "--budget", "8", "--limit", "5", "--max-tokens", "6", "--rounds", "1"]
    assert load_script("serving").main([*quick, "--clients", "1,3", "--cycles", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["clients"] for row in rows] == [1, 3]
    for row in rows:
        assert row["same_texts"] == "5 of 5"
        assert row["ratio"] == pytest.approx(row["server_tokens_per_second"] / row["library_tokens_per_second"])
    assert len([line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]) == 4


@pytest.mark.parametrize("argv", [["--clients", "0"], ["--rounds", "0"], ["--data", "nowhere.jsonl"]])
def test_invalid_arguments_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert load_script("serving").main(argv) == 2
    assert "error:" in capsys.readouterr().err


def test_predictions(capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("prediction")
    assert script.main(["--model", "tiny", "--budget", "8", "--max-tokens", "8", "--drafters", "pld,sam"]) == 0
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()]
    assert rows == ["tokens per pass", "---", "`pld`", "`sam`"]
    assert script.changed("a b c d e", 2) == "a something c something e"
    assert script.main(["--every", "0"]) == 2
    assert script.main(["--model", "tiny", "--drafters", "nobody"]) == 2
