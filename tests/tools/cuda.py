"""Small models for the tests of the GPU decoder, their inputs, and the expected outputs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from draftwood.models.config import ModelConfig
from draftwood.models.tensors import tensor_shapes
from draftwood.targets.base import ForwardOutput, Segment, chain_parents
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.native.weights import assemble
from draftwood.targets.tiny import TINY_CONFIG
from tests.conftest import random_parents
from tests.tools.triton import DEVICE, INTERPRETED

# As small as possible: a program of a kernel takes a millisecond in the interpreter.
SMALL = replace(
    TINY_CONFIG,
    vocab_size=259,
    hidden_size=32,
    intermediate_size=48,
    num_heads=2,
    num_kv_heads=1,
    context_length=4096,
    tied_embeddings=True,
    eos_token_ids=(),
)
# On a GPU products are split along the input, and heads share keys.
LARGE = replace(
    SMALL,
    vocab_size=5003,
    hidden_size=768,
    intermediate_size=1536,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
)
BASE = SMALL if INTERPRETED else LARGE
CACHE_TOKENS = 200 if INTERPRETED else 8192
WORSE = 1.5  # maximum error of the fused decoder relative to the eager one
SPARE = 2e-3  # if the eager one is exact by chance


def named_tensors(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Random weights by their Hugging Face names; hidden states start with values around 1."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
        tensors[name] = noise + 1.0 if "norm" in name else noise
    tensors["model.embed_tokens.weight"] *= config.hidden_size**0.5
    return tensors


def new_target(
    config: ModelConfig = BASE,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "fused-cuda",
    *,
    tensors: dict[str, torch.Tensor] | None = None,
    wide: bool = False,
    exact: bool = False,
) -> NativeTarget:
    """``wide``: the same rounded numbers in float32. ``exact``: passes that give a row the same bits."""
    named = tensors or named_tensors(config)
    used = torch.float32 if wide else dtype
    weights = assemble(config, lambda name: named[name].to(dtype).to(device=DEVICE, dtype=used))
    return NativeTarget(backend, config, weights, CACHE_TOKENS, backend=backend, exact=exact)


@dataclass(frozen=True, kw_only=True)
class Question:
    """Prompts for one pass and their trees for another; the last tree has no prompt."""

    prompts: tuple[int, ...]  # their lengths
    trees: tuple[int, ...]  # their sizes
    num_logits: tuple[int, ...]  # number of logits for each tree
    taps: tuple[int, ...] = ()
    num_best: int = 3

    def ask(self, target: NativeTarget, seed: int = 1) -> ForwardOutput:
        """The output of one forward pass for the trees, copied."""
        rng = random.Random(seed)
        ids = range(target.info.vocab_size)
        sequences = [target.open(length + size) for length, size in zip(self.prompts, self.trees, strict=True)]
        read = [
            Segment(sequence, rng.choices(ids, k=length), chain_parents(length), 0)
            for sequence, length in zip(sequences, self.prompts, strict=True)
            if length
        ]
        target.set_top(0)
        target.set_taps(())
        if read:
            target.forward(read)
        for segment in read:
            target.keep(segment.sequence, range(len(segment.token_ids)))
        trees = [
            Segment(sequence, rng.choices(ids, k=size), random_parents(rng, size), wanted)
            for sequence, size, wanted in zip(sequences, self.trees, self.num_logits, strict=True)
        ]
        target.set_top(self.num_best)
        target.set_taps(self.taps)
        output = copied(target.forward(trees))
        for sequence in sequences:
            target.close(sequence)
        return output


def copied(output: ForwardOutput) -> ForwardOutput:
    """A copy that stays valid after the next forward pass."""
    return output._replace(
        logits=output.logits.float().cpu().clone(),
        taps=None if output.taps is None else output.taps.float().cpu().clone(),
    )


class Answers(NamedTuple):
    fused: ForwardOutput
    eager: ForwardOutput  # in the same type
    exact: ForwardOutput  # in float32


def answers(
    config: ModelConfig, dtype: torch.dtype, question: Question, tensors: dict[str, torch.Tensor] | None = None
) -> Answers:
    return Answers(
        question.ask(new_target(config, dtype, tensors=tensors)),
        question.ask(new_target(config, dtype, "eager", tensors=tensors)),
        question.ask(new_target(config, dtype, "eager", tensors=tensors, wide=True)),
    )


def error(values: torch.Tensor, exact: torch.Tensor) -> float:
    return float((values.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30))


def assert_as_accurate(values: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor) -> None:
    """Overall and in the worst row."""
    assert values.shape == exact.shape
    assert values.isfinite().all()
    assert error(values, exact) <= WORSE * error(eager, exact) + SPARE
    worst = max((error(*rows) for rows in zip(eager, exact, strict=True)), default=0.0)
    for row, right in zip(values, exact, strict=True):
        assert error(row, right) <= 2 * WORSE * worst + SPARE


def assert_choices_follow(output: ForwardOutput, k: int) -> None:
    """Greedy ids and top entries match the output's logits, with ties to the lower id."""
    order = (-output.logits).sort(dim=-1, stable=True)
    assert output.greedy_ids.tolist() == order.indices[:, 0].tolist()
    if k == 0:
        assert output.top is None
        return
    assert output.top is not None
    assert output.top.ids.tolist() == order.indices[:, :k].tolist()
    np.testing.assert_array_equal(output.top.logits, -order.values[:, :k].numpy())
    totals = output.logits.double().logsumexp(dim=-1)
    np.testing.assert_allclose(output.top.log_total, totals.numpy(), atol=1e-4, rtol=1e-5)


def ids_of(target: NativeTarget, rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(target.info.vocab_size), k=count)


def committed_rows(target: NativeTarget, sequence: int) -> Sequence[torch.Tensor]:
    """Keys and values [layers, kv_heads, length, D] of a sequence after all moves."""
    target._decoder._move_now()  # type: ignore[attr-defined]
    extent = target.cache[sequence]
    slots = slice(extent.base, extent.base + extent.length)
    return [rows[:, :, slots].float().cpu() for rows in (target.cache.keys, target.cache.values)]
