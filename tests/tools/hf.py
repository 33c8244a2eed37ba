"""Shared by tests of the transformers target: tiny random models of every family, texts, reference logits."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the transformers target needs the extra 'hf'")

from draftwood.targets.base import Segment, chain_parents  # noqa: E402
from draftwood.targets.hf import HFTarget  # noqa: E402

VOCAB, CONTEXT, WINDOW, LAYERS = 67, 96, 7, 3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    # Large random weights: attention has to matter, or a wrong mask would not be detected.
    "initializer_range": 0.3,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
MIXED_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**GROUPED),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=LAYERS,
        n_head=4,
        n_positions=CONTEXT,
        initializer_range=0.3,
        eos_token_id=2,
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "phi": lambda: transformers.PhiConfig(**SIZES),
    "phi3-window": lambda: transformers.Phi3Config(**GROUPED, sliding_window=WINDOW),
    "gemma2": lambda: transformers.Gemma2Config(
        **GROUPED, head_dim=8, sliding_window=WINDOW, layer_types=MIXED_LAYERS, attn_logit_softcapping=2.0
    ),
    "gemma3-window": lambda: transformers.Gemma3TextConfig(
        **GROUPED, head_dim=8, sliding_window=WINDOW, layer_types=MIXED_LAYERS
    ),
    "mistral-window": lambda: transformers.MistralConfig(**GROUPED, sliding_window=WINDOW),
}
every_model = pytest.mark.parametrize("name", CONFIGS)


def build(config: Any) -> Any:
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


@cache
def target_of(name: str) -> HFTarget:
    target = HFTarget(build(CONFIGS[name]()), max_batch=16)
    target.set_taps(())
    return target


def plain(target: HFTarget, text: Sequence[int]) -> torch.Tensor:
    """Logits ``[n, V]`` of a text from the bare model, without our cache, mask or positions."""
    with torch.no_grad():
        logits: torch.Tensor = target._model(input_ids=torch.tensor([list(text)]), use_cache=False).logits[0]
    return logits


def text_of(rng: random.Random, size: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(size)]


def tree_of(rng: random.Random, size: int) -> tuple[list[int], list[int]]:
    return text_of(rng, size), [-1, *(rng.randrange(max(0, i - 4), i) for i in range(1, size))]


def prefill(target: Any, text: Sequence[int], chunk: int = 1000, capacity: int = CONTEXT) -> tuple[int, torch.Tensor]:
    sequence = target.open(capacity)
    rows = []
    for start in range(0, len(text), chunk):
        part = text[start : start + chunk]
        rows.append(target.forward([Segment(sequence, part, chain_parents(len(part)), len(part))]).logits)
        target.keep(sequence, range(len(part)))
    return sequence, torch.cat(rows)


def close_to(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
