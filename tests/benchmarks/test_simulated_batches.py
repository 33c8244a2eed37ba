"""``benchmarks/simulated_batches.py`` in a process of its own: it changes the clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SMALL = ["--model", "tiny", "--dtype", "auto", "--tasks", "math", "--limit", "2", "--batches", "4", "--per-place", "1"]
SMALL += ["--rounds", "1", "--max-tokens", "8", "--ignore-eos"]


def test_answers_are_those_of_plain_decoding_and_passes_take_their_time(tmp_path: Path) -> None:
    out = tmp_path / "cells.json"
    command = [sys.executable, "benchmarks/simulated_batches.py", *SMALL, "--pass-ms", "50", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "benchmarks")))}
    command += ["plain", "goose"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cells = json.loads(out.read_text())["cells"]
    assert [cell["drafter"] for cell in cells] == ["plain", "goose"]
    assert all(cell["equal"] == 1.0 for cell in cells)
    assert cells[0]["tokens_per_second"] < 4 / 0.05  # four tokens in each pass of 50 ms, by the simulated clock
