"""Shared by tests of figures: hand-made manifests, records, runs and statistics."""

from __future__ import annotations

import json
import random
from typing import Any

from draftwood.bench.figures.diff import Change
from draftwood.bench.figures.metrics import summarize
from draftwood.bench.figures.summary import Interval, Summary
from draftwood.bench.records.run_folder import BenchRun, RequestRecord, RunManifest
from draftwood.bench.settings import BenchSettings
from draftwood.engine.stats import RequestStats
from draftwood.tree import DraftTree, TreeBuilder

PLAIN = {"label": "plain", "kind": "drafter", "drafter": "plain", "options": {}, "memory": "request", "budget": 1}
GOOSE = {"label": "goose", "kind": "drafter", "drafter": "goose", "options": {}, "memory": "request", "budget": "auto"}
PEER = {"label": "llamacpp", "kind": "peer", "drafter": "llamacpp", "options": {}, "memory": "", "budget": 1}
MODEL = {"name": "tiny", "dtype": "float32", "backend": "cpu", "device": "cpu", "parameters": 80_000}
MACHINE = {"processor": "Some CPU", "cores": 2}

Paces = dict[str, float]  # seconds per token by method


def manifest(**values: Any) -> RunManifest:
    settings = BenchSettings(**values.pop("settings", {})).as_dict()
    fixed: dict[str, Any] = {
        "settings": settings,
        "methods": [PLAIN, GOOSE],
        "tasks": {"a": {"prompts": 2, "sha256": "aa"}, "b": {"prompts": 2, "sha256": "bb"}},
        "model": MODEL,
        "machine": MACHINE,
        "software": {},
        "command": "draftwood bench",
        "started": "2025-01-01T00:00:00Z",
    }
    return RunManifest(**{**fixed, **values})


def record(method: str, task: str, prompt: str, tokens: int, seconds: float, **values: Any) -> RequestRecord:
    """Reading the prompt takes one more second."""
    fixed: dict[str, Any] = {
        "output_tokens": tokens,
        "decode_tokens": tokens,
        "decode_seconds": seconds,
        "total_seconds": seconds + 1.0,
    }
    return RequestRecord(method=method, task=task, prompt=prompt, **{**fixed, **values})


def measured(
    paces: Paces, tasks: str = "ab", prompts: int = 10, noise: float = 0.02, seed: int = 0, **values: Any
) -> list[RequestRecord]:
    draw = random.Random(seed)
    return [
        record(
            method,
            task,
            str(prompt),
            20 + prompt,
            (20 + prompt) * pace * draw.uniform(1 - noise, 1 + noise),
            **{"stats": {"cycles": 4}, "first_token_seconds": pace, **values},
        )
        for prompt in range(prompts)
        for task in tasks
        for method, pace in paces.items()
    ]


def run(records: list[RequestRecord], name: str = "one", **values: Any) -> BenchRun:
    return BenchRun(name, manifest(**values), records)


def summary(*runs: BenchRun) -> Summary:
    (found,) = summarize(runs)
    return found


def change(changes: list[Change], method: str, task: str, metric: str) -> Change:
    (found,) = [c for c in changes if (c.method, c.task, c.metric) == (method, task, metric)]
    return found


def value(interval: Interval | None) -> float:
    assert interval is not None
    return interval.value


def two_tasks() -> list[RequestRecord]:
    return [
        record("plain", "a", "1", 10, 10.0),
        record("plain", "a", "2", 30, 10.0),
        record("goose", "a", "1", 10, 5.0),
        record("goose", "a", "2", 30, 3.0),
        record("plain", "b", "1", 8, 4.0),
        record("goose", "b", "1", 8, 2.0),
    ]


def spine_tree() -> DraftTree:
    """Nodes 1 - 2 are copied; 3 branches off the root and 4 off node 1, both recycled."""
    builder = TreeBuilder(0)
    one = builder.add(0, 11, "context")
    builder.add(one, 12, "context")
    builder.add(0, 21, "transition")
    builder.add(one, 22, "transition")
    return builder.build(route="spine")


def traced(*cycles: tuple[DraftTree, list[int]], **seconds: float) -> dict[str, Any]:
    """Statistics as a run stores them, through JSON."""
    stats = RequestStats(**{f"{name}_seconds": taken for name, taken in seconds.items()})
    for tree, accepted in cycles:
        stats.note_tree(tree, accepted, len(accepted) + 1)
    content: dict[str, Any] = json.loads(json.dumps(stats.as_dict()))
    return content
