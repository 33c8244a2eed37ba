"""``benchmarks/fixed_costs.py``: plain decoding takes what its passes cost. It replaces the clock, so it runs apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fixed_costs.py"


def test_tokens_per_second_follow_from_the_costs(tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"turns": ["abcabcabc"]}))
    where = ["--data", str(tmp_path), "--model", "tiny", "--tasks", "one", "--max-tokens", "12", "--costs", "arm"]
    command = [sys.executable, str(SCRIPT), *where, "plain", "goose@4"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=SCRIPT.parents[1])
    _, plain, goose = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
    assert plain[1] == f"{1e3 / (5.4 + 0.25):.1f}"
    assert float(goose[6]) >= 5.4  # a pass
