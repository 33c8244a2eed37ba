"""Shared by tests of training: tiny targets with their texts, methods by name, and slow reference drafting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftwood import LLM, SamplingParams
from draftwood.heads import Eagle3Head, EagleHead, HeadModule, build_head, default_head_config
from draftwood.models.config import ModelConfig
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.tiny import TINY_CONFIG, tiny_target
from draftwood.text.bytes import ByteTokenizer
from draftwood.train.base import Batch, Example, Losses, Signals
from draftwood.train.frozen.frozen_target import FrozenTarget
from draftwood.train.methods import method_class
from draftwood.train.methods.base import Method
from tests.tools.head import GrowingCache, random_head

MODEL = replace(TINY_CONFIG, num_layers=6)  # enough for three taps that are not the last state
KIND_OF = {
    "eagle": "eagle",
    "hass": "eagle",
    "eagle3": "eagle3",
    "griffin": "eagle",
    "medusa": "medusa",
    "hydra": "hydra",
}  # by method


@cache
def target_of(model: ModelConfig = MODEL) -> NativeTarget:
    return tiny_target(model)


def random_examples(sizes: Sequence[int], seed: int = 0, prompt: int = 2, model: ModelConfig = MODEL) -> list[Example]:
    """Texts of random tokens; those after the first ``prompt`` are marked as written by the target."""
    rng = np.random.default_rng(seed)
    return [
        Example(rng.integers(0, model.vocab_size, size).astype(np.int32), np.arange(size) >= prompt) for size in sizes
    ]


@cache
def written_prompts(count: int = 4, size: int = 6) -> tuple[tuple[int, ...], ...]:
    rng = np.random.default_rng(1)
    return tuple(tuple(int(token) for token in rng.integers(0, 256, size)) for _ in range(count))


@cache
def written_examples(count: int = 4, length: int = 24) -> list[Example]:
    """Texts generated greedily by the target."""
    llm = LLM.from_target(target_of(), ByteTokenizer(), drafter="plain")
    prompts = written_prompts(count)
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    answers = [completion.token_ids for completion in llm.generate([list(prompt) for prompt in prompts], params)]
    return [
        Example(np.array([*prompt, *answer], dtype=np.int32), np.arange(len(prompt) + len(answer)) >= len(prompt))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]


def new_head(kind: str, seed: int = 0, model: ModelConfig = MODEL, **changes: Any) -> HeadModule:
    """A newly initialized head."""
    head = build_head(default_head_config(kind, model, **changes))
    head.bind(target_of(model).parts())
    head.reset_parameters(torch.Generator().manual_seed(seed))
    return head


def method_for(
    name: str, head: HeadModule | None = None, *, seed: int = 0, changes: dict[str, Any] | None = None, **options: Any
) -> Method:
    """With a random head by default; ``changes`` apply to its configuration."""
    if head is None:
        head = random_head(KIND_OF[name], MODEL, **(changes or {}))
    cls = method_class(name)
    method = cls(cls.Options(**options), head, FrozenTarget.of(target_of(), head), seed)
    head.train()
    return method


def losses_of(method: Method, examples: Sequence[Example]) -> Losses:
    batch = Batch.of(examples)
    return method.losses(batch, method.frozen.signals(batch))


def gradients(method: Method, examples: Sequence[Example]) -> dict[str, Tensor | None]:
    method.head.zero_grad(set_to_none=True)
    losses_of(method, examples).total.backward()
    return {name: parameter.grad for name, parameter in method.head.named_parameters()}


def train(method: Method, examples: Sequence[Example], num_steps: int, lr: float) -> list[Losses]:
    """AdamW with a cosine schedule on the same texts; the losses before every step and after the last."""
    batch = Batch.of(examples)
    signals = method.frozen.signals(batch)
    optimizer = torch.optim.AdamW(method.head.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    history = []
    for step in range(num_steps):
        method.begin_step(step, num_steps)
        losses = method.losses(batch, signals)
        optimizer.zero_grad()
        losses.total.backward()
        torch.nn.utils.clip_grad_norm_(method.head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        history.append(losses)
    with torch.no_grad():
        return [*history, method.losses(batch, signals)]


@torch.no_grad()
def drafted(head: EagleHead | Eagle3Head, token_ids: Tensor, features: Tensor, root: int, num_steps: int) -> Tensor:
    """The outputs ``[steps, H]`` of a drafter that has read the text up to pair ``root`` and then continues on its own,
    token by token with a cache. ``features [L, H]`` are the target's."""
    cache = GrowingCache()
    output = torch.empty(0)
    found = []
    for pair in range(root + num_steps):
        feature = features[pair] if pair <= root else output
        token = token_ids[pair + 1]
        output = head(head.embed(token)[None], feature[None], torch.tensor([pair]), cache.attend)[0]
        if pair >= root:
            found.append(output)
    return torch.stack(found)


def text_of(batch: Batch, signals: Signals, row: int) -> tuple[Tensor, Signals]:
    """One text of a batch without its padding."""
    size = int(batch.lengths[row])
    return batch.token_ids[row, :size], Signals(signals.taps[row, :size], signals.hidden[row, :size])
