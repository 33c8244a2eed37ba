"""Shared by tests of benchmark runs: small runs of the tiny model, custom prompts, a spy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftwood import SamplingParams
from draftwood.bench.records.run_folder import BenchRun
from draftwood.bench.run.engines import DrafterEngine
from draftwood.bench.run.runner import RunSpec, run_bench
from draftwood.bench.settings import BenchSettings

BASE: dict[str, Any] = {
    "model": "tiny",
    "drafters": ("plain", "pld", "goose"),
    "budget": (8,),
    "max_tokens": 12,
    "limit": 2,
    "tasks": ("code", "chat"),
}


def bench(folder: Path, **settings: Any) -> BenchRun:
    return run_bench(RunSpec(settings=BenchSettings(**{**BASE, **settings}), folder=folder))


def conversations(folder: Path, *prompts: tuple[str, ...], name: str = "talk") -> str:
    folder.mkdir(exist_ok=True)
    rows = [{"id": str(number), "turns": list(turns)} for number, turns in enumerate(prompts)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


class Spy:
    """Every method answers with its name and a number. Fails on request; records the prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, str]] = []  # the method and the text of the prompt
        self.failing: dict[str, int] = {}  # by method: the number of its next answer that fails
        self.params: list[SamplingParams] = []
        answer = DrafterEngine.generate

        def spied(engine: DrafterEngine, prompts: Any, params: SamplingParams) -> Any:
            who = engine.llm.drafter
            if who in self.failing:
                self.failing[who] -= 1
                if self.failing[who] < 0:
                    del self.failing[who]
                    raise RuntimeError(f"{who} fails")
            self.asked += [(who, engine.llm.tokenizer.decode(prompt)) for prompt in prompts]
            self.params.append(params)
            answers = answer(engine, prompts, params)
            return [[s._replace(text=f"{who} said {len(self.params)}.") for s in samples] for samples in answers]

        monkeypatch.setattr(DrafterEngine, "generate", spied)

    def second_turns(self) -> set[str]:
        return {text for _, text in self.asked if "second" in text}
