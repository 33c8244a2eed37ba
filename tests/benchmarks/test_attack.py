"""``benchmarks/attack.py``: a short attack on a server with a tiny model, and what counts as a failure."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("uvicorn")

from tests.tools.paths import BENCHMARKS
from tests.tools.serve import serving

ARGS = argparse.Namespace(requests=200, clients=8, seconds=0.5, patience=30.0, seed=1)


@pytest.fixture(scope="module")
def attack() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)  # as for a script
        yield importlib.import_module("attack")
    del sys.modules["attack"], sys.modules["attack_clients"]


def test_a_short_attack(attack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    clients = sys.modules["attack_clients"]
    monkeypatch.setattr(clients, "NUM_IDLE", 40)
    monkeypatch.setattr(clients, "NUM_SLOW", 6)
    with serving({"max_connections": 30}, drafter="goose") as server:
        result = asyncio.run(attack.attack(ARGS, server.url, os.getpid()))
    assert [row["attack"] for row in result["rows"]] == [
        "odd requests", "disconnects", "mixed clients", "slow bodies", "idle connections",
    ]  # fmt: skip
    assert result["gauges"] == attack.NOTHING_OPEN
    assert all(0 < times.first <= times.whole for times in result["times"])
    assert len(result["times"]) > 0
    assert result["cache_bytes"][2] > 0
    assert result["statuses"]["200"] > 0
    assert result["statuses"]["400"] > 0
    assert result["responses"]["499"] > 0  # disconnected
    assert not [status for status in result["responses"] if status.startswith("5")]
    assert not any(row["health_failed"] for row in result["rows"])
    assert not [status for status in result["statuses"] if status.startswith("5")]


GOOD: dict[str, Any] = {
    "rows": [{"attack": "a", "worst_health": 0.1, "health_failed": 0}],
    "responses": {"200": 3, "400": 1, "499": 2},
    "statuses": {"200": 3, "400": 1, "closed": 2},
    "bytes_before": 100,
    "bytes_after": 109,
}


@pytest.mark.parametrize(
    "change",
    [
        {"statuses": {"500": 1}},
        {"responses": {"503": 1}},
        {"bytes_after": 111},
        {"gauges": {"open_samples": 1.0}},
        {"rows": [{"attack": "a", "worst_health": 1.1, "health_failed": 0}]},
        {"rows": [{"attack": "a", "worst_health": 0.1, "health_failed": 1}]},
    ],
)
def test_what_counts_as_a_failure(attack: ModuleType, change: dict[str, Any]) -> None:
    good = {**GOOD, "gauges": attack.NOTHING_OPEN}
    assert attack.judge(good) == []
    assert attack.judge({**good, "bytes_before": None}) == []
    assert len(attack.judge({**good, **change})) == 1


def test_other_machines_are_not_attacked(attack: ModuleType) -> None:
    with pytest.raises(SystemExit):
        attack.Server("http://192.0.2.1:8000")
