"""The real default model: speculative output equals generate of transformers, token for token, in float32."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.models.find import ModelFolder
from tests.conftest import logits_after
from tests.tools.paths import ROOT

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.model

DRAFTERS = ("plain", "pld", "goose", "stand", "recycling", "sam")
# A folder of prompt files (JSON lines with "turns") for the long run.
DATA = Path(os.environ.get("DRAFTWOOD_DATA", ROOT.parent / "shared" / "data" / "bench"))
TASKS = ("humaneval", "mbpp", "classeval", "gsm8k", "mt_bench")
PROMPTS = (
    "Say hello, hello, hello, and hello again.",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
    "List the numbers from one to ten in words, then once more.",
    "Übersetze ins Englische: Der Hund läuft durch den Wald. 🌲",
)


@pytest.fixture(scope="module")
def llm(smollm2: ModelFolder) -> Iterator[LLM]:
    with LLM("smollm2", dtype="float32", device="cpu", budget=8, cache_tokens=16_384) as llm:
        yield llm


@pytest.fixture(scope="module")
def model(smollm2: ModelFolder) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32).eval()


def long_prompts() -> list[str]:
    """Ten prompts of each of five tasks."""
    prompts = []
    for task in TASKS:
        lines = (DATA / f"{task}.jsonl").read_text().splitlines()[:10]
        prompts += [json.loads(line)["turns"][0] for line in lines]
    return prompts


def expected(model: torch.nn.Module, prompt: list[int], num_tokens: int) -> list[int]:
    with torch.inference_mode():
        output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=num_tokens)
    return output[0, len(prompt) :].tolist()


def test_logits_match_transformers(llm: LLM, model: torch.nn.Module) -> None:
    for prompt in PROMPTS:
        tokens = llm.tokenizer.encode(prompt)
        with torch.inference_mode():
            theirs = model(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(logits_after(llm._engine.target, tokens), theirs, atol=1e-3, rtol=1e-4)
        ours = logits_after(llm._engine.target, tokens)
        assert (ours - theirs).norm() / theirs.norm() < 1e-5


def test_greedy_output_equals_generate(llm: LLM, model: torch.nn.Module) -> None:
    prompts = [llm.tokenizer.apply_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    reference = [expected(model, prompt, 32) for prompt in prompts]
    for drafter in DRAFTERS:
        together = llm.generate(prompts, SamplingParams(max_tokens=32), drafter=drafter)
        assert [c.token_ids for c in together] == reference, drafter


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason=f"no prompt files in {DATA}: set DRAFTWOOD_DATA")
@pytest.mark.parametrize("max_batch", [1, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_fifty_prompts_equal_generate(llm: LLM, model: torch.nn.Module, drafter: str, max_batch: int) -> None:
    prompts = [llm.tokenizer.apply_chat([{"role": "user", "content": prompt}]) for prompt in long_prompts()]
    runs = LLM.from_target(llm._engine.target, llm.tokenizer, drafter=drafter, budget=8, max_batch=max_batch)
    results = runs.generate(prompts, SamplingParams(max_tokens=64))
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert result.token_ids == list(remembered(model, tuple(prompt))), f"prompt {number}"


@cache
def remembered(model: torch.nn.Module, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """The output of transformers is slow to compute, so it is cached."""
    return tuple(expected(model, list(prompt), 64))
