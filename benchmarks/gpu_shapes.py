"""Random models and draft heads with the shapes of real ones, for timing passes without downloading weights."""

from __future__ import annotations

import torch

from draftwood.heads import Eagle3Head, build_head, default_head_config
from draftwood.models.config import ModelConfig, Rope
from draftwood.models.tensors import tensor_shapes
from draftwood.sources.neural.base import DraftSegment
from draftwood.sources.neural.head import EagleModel
from draftwood.targets.base import Segment, chain_parents
from draftwood.targets.native.target import NativeTarget
from draftwood.targets.native.weights import assemble

CONTEXT_LENGTH = 32_768
DRAFT_VOCABULARY = 32_000
SURE = 0.7  # mean probability of a head's best token


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


def new_head(target: NativeTarget) -> Eagle3Head:
    """Create a random head whose vocabulary is spread over the target's."""
    info, total = target.info, target.info.vocab_size
    size = min(DRAFT_VOCABULARY, total - 1)
    config = default_head_config("eagle3", target.config, draft_vocab_size=size)
    head = build_head(config, device=info.device, dtype=info.dtype)
    assert isinstance(head, Eagle3Head)
    generator = torch.Generator(info.device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    head.set_vocabulary(torch.arange(size, device=info.device) * total // size)
    head.bind(target.parts())
    return head.eval()


@torch.inference_mode()
def make_sure(head: Eagle3Head, target: NativeTarget, rows: int = 64) -> float:
    """Scale the head's logits until its best token has mean probability SURE; return it."""
    taps = head.config.taps_for(target.info.num_layers)
    model = EagleModel(head, taps, rows)
    sequence = model.open(rows)
    generator = torch.Generator(target.info.device).manual_seed(1)
    width = len(taps) * target.info.hidden_size
    given = torch.randn(rows, width, generator=generator, device=target.info.device).to(target.info.dtype)
    tokens = [31 * row % target.info.vocab_size for row in range(rows)]
    model.forward([DraftSegment(Segment(sequence or 0, tokens, chain_parents(rows), 1), given)], 1)
    logits = head.logits(model._hidden)  # [rows, Vd]

    def mean(scale: float) -> float:
        return float((scale * logits).softmax(dim=-1).amax(dim=-1).mean())

    low, high = 0.0, 1e4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if mean(middle) < SURE else (low, middle)
    assert head.lm_head is not None
    head.lm_head.weight.mul_(high)
    return mean(high)
