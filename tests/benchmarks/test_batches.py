"""``benchmarks/batches.py`` on the tiny model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from draftwood.engine.ways import Ways
from tests.tools.script import load_script


def test_every_cell_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batches, turns = load_script("batches"), Ways.turns
    lines = [json.dumps({"id": name, "turns": ["one two one two"]}) for name in "ab"]
    (tmp_path / "own.jsonl").write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "cells.json"
    wanted = ["plain", "goose:budget=4", "--model", "tiny", "--data", str(tmp_path), "--batches", "1,3", "--alone"]
    fast = ["--max-tokens", "6", "--rounds", "1", "--device", "cpu", "--dtype", "float32", "--turns", "auto,never"]
    assert batches.main([*wanted, *fast, "--out", str(out)]) == 0
    Ways.turns = turns
    cells = json.loads(out.read_text(encoding="utf-8"))["cells"]
    assert [(cell["batch"], cell["drafter"], cell["turns"]) for cell in cells] == [
        (batch, drafter, turns)
        for batch in (1, 3)
        for drafter in ("plain", "goose:budget=4")
        for turns in ("auto", "never")
    ]
    assert all(cell["equal"] == cell["equal_alone"] == 1.0 for cell in cells)
    assert [cell["prompts"] for cell in cells] == [2] * 4 + [6] * 4
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(shown) == 2 * (2 + 4)
    assert len({line.count("|") for line in shown}) == 1


def test_table_has_one_row_for_all_tasks_of_a_drafter() -> None:
    batches = load_script("batches")
    measured = itertools.product((8, 1), (("code", 3.0), ("chat", 1.0)), ("plain", "blend"), ("auto", "never"))
    cells = [
        batches.Cell(
            drafter=drafter,
            batch=batch,
            task=task,
            turns=turns,
            prompts=2,
            tokens_per_second=times * 100,
            times_plain=times,
            tau=1.0,
            nodes=1.0,
            host=0.5,
            equal=1.0,
            equal_alone=None,
        )
        for batch, (task, times), drafter, turns in measured
    ]
    header, _, *rows = ([each.strip() for each in line.split("|")[1:-1]] for line in batches.table(cells).splitlines())
    assert header[:6] == ["batch", "drafter", "turns", "mean", "code", "chat"]
    assert [tuple(row[:3]) for row in rows] == list(
        itertools.product(("1", "8"), ("plain", "blend"), ("auto", "never"))
    )
    assert {tuple(row[3:]) for row in rows} == {("2.00x", "3.00x", "1.00x", "200", "1.00", "1.0", "50%", "4 of 4")}


def test_unknown_tasks_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_script("batches").main(["--tasks", "none", "--model", "tiny"]) == 2
    assert "none" in capsys.readouterr().err
