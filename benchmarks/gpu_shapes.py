"""Random models with the shapes of real ones, for timing passes without downloading weights."""

from __future__ import annotations

import torch

from draftwood.models.config import ModelConfig, Rope
from draftwood.models.tensors import tensor_shapes
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.native.weights import assemble

CONTEXT_LENGTH = 32_768


def shape(heads: tuple[int, int, int], sizes: tuple[int, int, int, int], *, tied: bool, bias: bool) -> ModelConfig:
    """``heads``: query heads, key heads, head size. ``sizes``: layers, hidden, intermediate, vocabulary."""
    return ModelConfig(
        architecture="Qwen2ForCausalLM" if bias else "LlamaForCausalLM",
        vocab_size=sizes[3],
        hidden_size=sizes[1],
        intermediate_size=sizes[2],
        num_layers=sizes[0],
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        norm_eps=1e-5,
        context_length=CONTEXT_LENGTH,
        rope=Rope(theta=500_000.0),
        tied_embeddings=tied,
        qkv_bias=bias,
        o_bias=False,
        qk_norm=False,
    )


SHAPES = {
    "135M": shape((9, 3, 64), (30, 576, 1536, 49_152), tied=True, bias=False),  # SmolLM2
    "1.5B": shape((12, 2, 128), (28, 1536, 8960, 151_936), tied=True, bias=True),  # Qwen2.5
    "8B": shape((32, 8, 128), (32, 4096, 14_336, 128_256), tied=False, bias=False),  # Llama 3
    "tiny": shape((4, 2, 16), (2, 64, 128, 512), tied=True, bias=False),
}


def random_target(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    cache_tokens: int,
    quantize: str | None = None,
    *,
    exact: bool = False,
) -> NativeTarget:
    """Create a model with seeded normal weights (deviation 0.02), norms around 1."""
    config = SHAPES[name]
    shapes = tensor_shapes(config)
    generator = torch.Generator(device).manual_seed(0)

    def weight(tensor: str) -> torch.Tensor:
        mean = 1.0 if "norm" in tensor else 0.0
        return torch.empty(shapes[tensor], dtype=dtype, device=device).normal_(mean, 0.02, generator=generator)

    return NativeTarget(name, config, assemble(config, weight, quantize=quantize), cache_tokens, exact=exact)
