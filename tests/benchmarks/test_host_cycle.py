"""``benchmarks/host_cycle.py``: it runs, and its phases make up the whole cycle."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.tools.script import load_script

QUICK = ("--batches", "1,3", "--rounds", "2", "--cycles", "12", "--warm-up", "12", "--prompt", "20")


@pytest.fixture(scope="module")
def host_cycle() -> ModuleType:
    return load_script("host_cycle")


@pytest.mark.parametrize("more", [(), ("--budget", "6"), ("--temperature", "0.8")])
def test_every_drafter_has_a_row_per_batch(
    host_cycle: ModuleType, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert host_cycle.main([*QUICK, *more, "plain", "goose", "pld"]) == 0
    header, _, *rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert {"draft", "fit_trees", "launch", "accept_trees", "learn", "write"} < set(header)
    assert [row[:2] for row in rows] == [[name, batch] for name in ("plain", "goose", "pld") for batch in ("1", "3")]
    for row in rows:
        nodes, _, *times, total, waiting = map(float, row[2:])
        assert nodes >= 1.0
        assert sum(times) == pytest.approx(total, abs=1.0)
        assert 0.0 < waiting < total
        assert (nodes == 1.0) == (row[0] == "plain") or more == ("--temperature", "0.8")
