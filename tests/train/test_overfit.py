"""Heads that are trained on a few texts memorize and draft them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.heads import Eagle3Head, save_head
from draftwood.text.bytes import ByteTokenizer
from tests.conftest import threads
from tests.tools.train import KIND_OF, method_for, new_head, target_of, train, written_examples, written_prompts

COUNT, LENGTH = 2, 16  # texts that the target wrote


@pytest.mark.parametrize(
    ("name", "num_steps", "lr", "options"),
    [
        ("eagle", 120, 0.015, {"noise": 0.0}),
        ("hass", 120, 0.015, {"noise": 0.0}),
        ("eagle3", 120, 0.01, {"steps": 3}),
        ("medusa", 25, 0.01, {}),
        ("hydra", 25, 0.01, {}),
    ],
)
def test_few_texts_are_memorized(name: str, num_steps: int, lr: float, options: dict[str, Any]) -> None:
    method = method_for(name, new_head(KIND_OF[name]), **options)
    with threads(1):
        history = train(method, written_examples(COUNT, LENGTH), num_steps, lr)
    first, last = history[0].parts, history[-1].parts
    assert first["accuracy"] < 0.1
    assert last["accuracy"] > 0.9
    assert last["loss"] < 0.6 * first["loss"]


def test_a_trained_head_drafts(tmp_path: Path) -> None:
    """From texts of the target to a saved head used by an LLM; the vocabulary comes from the texts."""
    examples = written_examples(COUNT, LENGTH)
    tokens = torch.from_numpy(np.unique(np.concatenate([example.token_ids for example in examples])).astype(np.int64))
    head = new_head("eagle3", draft_vocab_size=len(tokens))
    assert isinstance(head, Eagle3Head)
    head.set_vocabulary(tokens)
    head.reset_parameters(torch.Generator().manual_seed(0))
    with threads(1):
        train(method_for("eagle3", head, steps=4), examples, 45, 0.02)
    llm = LLM.from_target(
        target_of(),
        ByteTokenizer(),
        drafter="eagle3",
        drafter_options={"head": str(save_head(head, tmp_path / "head")), "growth": "chain", "depth": 4},
        budget=5,
    )
    prompts = [list(prompt) for prompt in written_prompts(COUNT)]
    found = llm.generate(prompts, SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    for completion, example in zip(found, examples, strict=True):
        assert list(completion.token_ids) == example.token_ids[-LENGTH:].tolist()
    tau = sum(c.stats.output_tokens for c in found) / sum(c.stats.cycles for c in found)
    assert tau > 2.0
