"""A tiny random model, to test everything above the target in milliseconds on any CPU."""

import torch

from draftwood.config import CPU_FORMATS
from draftwood.models import ModelConfig, Rope, tensor_shapes
from draftwood.targets.native import NativeTarget, assemble, assemble_stored, quantized_tensors
from draftwood.text import ByteTokenizer

TINY_CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=ByteTokenizer.vocab_size,
    hidden_size=48,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    norm_eps=1e-5,
    context_length=1024,
    rope=Rope(),
    tied_embeddings=False,
    eos_token_ids=ByteTokenizer.eos_token_ids,
)


def tiny_target(
    config: ModelConfig = TINY_CONFIG,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    cache_tokens: int = 8192,
    backend: str = "auto",
    quantize: str | None = None,
    exact: bool = False,
) -> NativeTarget:
    """Builds a native target with seeded random weights, scaled so that its choices are not near ties."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        scale = 0.5 if len(shape) == 1 else 2.0 / shape[-1] ** 0.5
        noise = torch.randn(shape, generator=generator) * scale
        tensors[name] = noise + 1.0 if "norm" in name else noise
    if quantize in CPU_FORMATS:
        weights = assemble_stored(config, quantized_tensors(config, tensors.__getitem__, quantize), dtype)
    else:
        weights = assemble(config, lambda name: tensors[name].to(device=device, dtype=dtype), quantize=quantize)
    return NativeTarget("tiny", config, weights, cache_tokens, backend=backend, exact=exact, quantize=quantize)
