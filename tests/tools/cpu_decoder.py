"""Small random models in the decoders for CPUs, for the tests of the fused one."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import replace

import torch

from draftwood.models.config import ModelConfig, Rope
from draftwood.models.tensors import tensor_shapes
from draftwood.targets.base import ForwardOutput, Segment, chain_parents
from draftwood.targets.cache import KVCache
from draftwood.targets.native.cpu import CpuDecoder
from draftwood.targets.native.decoder import Decoder, pack
from draftwood.targets.native.eager import EagerDecoder
from draftwood.targets.native.weights import Weights, assemble
from draftwood.targets.tiny import TINY_CONFIG

CPU = torch.device("cpu")
BASE = replace(TINY_CONFIG, vocab_size=259, hidden_size=64, tied_embeddings=True, eos_token_ids=())
VARIANTS = {
    "plain": {},
    "group of 1": {"num_heads": 2},
    "group of 3": {"num_heads": 6},
    "group of 4": {"num_heads": 8},
    "qk norm": {"qk_norm": True},
    "biases": {"qkv_bias": True, "o_bias": True},
    "window": {"sliding_window": 37},
    "tiny window": {"sliding_window": 2},
    "untied": {"tied_embeddings": False},
    "head 64": {"head_dim": 64},
    "head 96": {"head_dim": 96},
    "head 128": {"head_dim": 128, "num_heads": 6, "sliding_window": 70},
    "head 10": {"head_dim": 10},
    "odd sizes": {"hidden_size": 40, "intermediate_size": 100, "vocab_size": 101, "tied_embeddings": False},
    "odder sizes": {"hidden_size": 50, "intermediate_size": 37, "vocab_size": 3},
    "llama3 rope": {"rope": Rope(kind="llama3", theta=5e5, factor=8.0, original_context=128)},
    "everything": {
        "num_heads": 6,
        "qk_norm": True,
        "qkv_bias": True,
        "o_bias": True,
        "sliding_window": 70,
        "tied_embeddings": False,
        "head_dim": 24,
        "hidden_size": 100,
        "vocab_size": 333,
    },
}


class Model:
    """A decoder with its cache: the bookkeeping of the native target, without its choice of a decoder."""

    def __init__(
        self,
        kind: type[CpuDecoder] | type[EagerDecoder],
        config: ModelConfig,
        weights: Weights,
        cache_type: torch.dtype,
    ) -> None:
        self.cache = KVCache(config.num_layers, config.num_kv_heads, config.head_dim, 4096, cache_type, CPU)
        for rows in (self.cache.keys, self.cache.values):
            rows.fill_(float("nan"))  # unwritten values must have no effect
        own = copy.deepcopy(weights)  # the fused decoder consumes them
        self.decoder: Decoder = (
            CpuDecoder(config, own, self.cache) if kind is CpuDecoder else EagerDecoder(config, own, self.cache, CPU)
        )

    def open(self, prompt: Sequence[int] = (), chunk: int = 10_000) -> int:
        sequence = self.cache.open(512)
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            self.run(Segment(sequence, part, chain_parents(len(part)), 0))
            self.cache.keep(sequence, range(len(part)))
        return sequence

    def run(self, *segments: Segment, taps: tuple[int, ...] = ()) -> ForwardOutput:
        output = self.decoder.forward(pack(segments, self.cache), taps)
        # The next forward writes to the same memory.
        return output._replace(logits=output.logits.clone(), greedy_ids=output.greedy_ids.clone())


def fused(config: ModelConfig = BASE, dtype: torch.dtype = torch.float32) -> Model:
    return Model(CpuDecoder, config, random_weights(config, dtype), dtype)


def random_weights(config: ModelConfig, dtype: torch.dtype = torch.float32) -> Weights:
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        noise = torch.randn(shape, generator=generator) * (0.3 if len(shape) == 1 else shape[-1] ** -0.5)
        tensors[name] = noise + 1.0 if "norm" in name else noise
    return assemble(config, lambda name: tensors[name].to(dtype))


def random_ids(config: ModelConfig, count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(config.vocab_size), k=count)


def random_parents(count: int, seed: int) -> list[int]:
    """A tree with deep and wide parts."""
    pick = random.Random(seed)
    return [-1] + [pick.choice([i - 1, i - 1, pick.randrange(i)]) for i in range(1, count)]
