"""What the tests of memories share: who learns, an LLM with a memory, and readers of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open

from draftwood import LLM, SamplingParams
from draftwood.models.config import ModelConfig
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from draftwood.text.bytes import ByteTokenizer

PROMPT = "Once there was a tree."
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
LEARNING = ["goose", "iso3", "iso5", "recycling", "sam+recycling", "sequoia", "stand"]
FORGETFUL = ["anpd", "lookahead", "plain", "pld", "sam"]


def open_llm(
    memory: str | Path, drafter: Any = "goose", config: ModelConfig = TINY_CONFIG, max_batch: int = 8, **options: Any
) -> LLM:
    return LLM.from_target(
        tiny_target(config, cache_tokens=4096),
        ByteTokenizer(),
        drafter=drafter,
        drafter_options=options,
        memory=memory,
        budget=12,
        max_batch=max_batch,
    )


def cycles(llm: LLM, prompt: str = PROMPT) -> int:
    return llm.generate(prompt, PARAMS)[0].stats.cycles


def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="numpy") as file:
        return dict(file.metadata())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
