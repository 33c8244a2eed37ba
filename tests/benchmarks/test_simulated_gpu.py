"""``benchmarks/simulated_gpu.py`` in a process of its own: it changes the clock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_drafter_has_a_row() -> None:
    command = [sys.executable, "benchmarks/simulated_gpu.py", "--batches", "5", "--max-tokens", "8", "plain", "goose"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT)))}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("| 5 ")]
    assert [row.split(" | ")[1] for row in rows] == ["plain", "goose"]
