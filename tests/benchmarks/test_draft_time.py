"""``benchmarks/draft_time.py`` on a tiny model and a CPU: it runs, figures are consistent, unsupported setups are
reported."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.tools.script import load_script

QUICK = ("--shapes", "tiny", "--context", "24", "--cycles", "3", "--warm-up", "1", "--budget", "12", "--device", "cpu")


@pytest.fixture(scope="module")
def draft_time() -> ModuleType:
    return load_script("draft_time")


def test_every_growth_has_a_row(draft_time: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "draft.json"
    assert draft_time.main([*QUICK, "--out", str(out)]) == 0
    content = json.loads(out.read_text(encoding="utf-8"))
    rows = {row["growth"]: row for row in content["rows"]}
    assert list(rows) == ["chain", "beam", "optimal", "salf"]
    assert (rows["chain"]["nodes"], rows["chain"]["passes"]) == (8, 7)
    for row in rows.values():
        assert 1 <= row["tokens"] <= row["nodes"] <= 12
        assert row["share"] == pytest.approx(row["draft_ms"] / row["verify_ms"])
        assert 0.0 < row["pass_ms"] < row["draft_ms"]
        assert row["host_ms"] > 0.0
        assert row["device_ms"] is None  # there is no GPU
    assert 1 <= rows["salf"]["passes"] <= rows["optimal"]["passes"]
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows)
    assert {line.count("|") for line in table} == {12}


def test_random_head_has_confidence_of_a_trained_one(draft_time: ModuleType) -> None:
    target = draft_time.random_target("tiny", torch.float32, torch.device("cpu"), 64)
    head = draft_time.new_head(target)
    assert 0.6 < draft_time.make_sure(head, target) < 0.8


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--shapes", "70B"], ["no such shape", "1.5B"]),
        (["--growths", "wild"], ["no such growth", "salf"]),
        ([*QUICK, "--cycles", "0"], ["--cycles"]),
        ([*QUICK, "--budget", "1"], ["--budget 1"]),
        ([*QUICK, "--device", "toaster"], ["device"]),
    ],
)
def test_invalid_arguments_are_refused(
    draft_time: ModuleType, argv: list[str], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert draft_time.main(argv) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in told), err


def test_without_a_gpu_large_shapes_are_refused(
    draft_time: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert draft_time.main([]) == 2
    err = capsys.readouterr().err
    assert "There is no GPU here" in err
    assert "--shapes tiny" in err
