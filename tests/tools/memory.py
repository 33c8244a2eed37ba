"""Shared by tests of memories: drafters with memory, an LLM with a memory, and readers of its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import safe_open

from draftwood import LLM, SamplingParams
from draftwood.drafters import Drafter
from draftwood.drafters.copying import CopyingDrafter
from draftwood.models.config import ModelConfig
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from draftwood.text.bytes import ByteTokenizer
from tests.tools.engine import STANDALONE

PROMPT = "Once there was a tree."
PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)
FORGETFUL = [  # with default options
    name
    for name, cls in STANDALONE.items()
    if issubclass(cls, CopyingDrafter) or cls.new_memory.__func__ is Drafter.new_memory.__func__
]
LEARNING = [name for name in STANDALONE if name not in FORGETFUL]


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
