"""``benchmarks/greedy_acceptance.py``: it runs on a tiny model, and its losses are correct."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.tools.script import load_script
from tests.tools.trainer import configuration, data_folder, run


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("greedy_acceptance")


def test_log_loss_counts_other_tokens_as_one_class(script: ModuleType) -> None:
    probs = np.array([[0.5, 0.25], [0.5, 0.25]], np.float32)
    found = script.log_loss(script.Guesses(probs, np.array([1, 2])), 1.0)
    assert found == pytest.approx(-math.log(0.25), abs=1e-5)
    assert script.log_loss(script.Guesses(probs, np.array([0, 0])), 0.5) == pytest.approx(
        -math.log(0.25 / 0.375), abs=1e-5
    )


def test_every_depth_has_a_row(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(configuration(tmp_path / "start"))
    start = f"head.start={tmp_path / 'start' / 'head'}"
    assert script.main([start, "model.name=tiny", f"data.folder={data_folder()}", "--depth", "3", "--texts", "4"]) == 0
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[2:5]] == ["| 1", "| 2", "| 3"]
    counts = [int(row[1]) for row in rows[2:5]]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 0


def test_errors_are_reported(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--depth", "0"]) == 2
    assert "--depth" in capsys.readouterr().err
