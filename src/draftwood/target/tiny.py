"""A tiny random model and a byte tokenizer: everything above the target can be tried in milliseconds on any CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftwood.target.chat import Message, check_messages
from draftwood.target.native.config import ModelConfig, Rope
from draftwood.target.native.target import NativeTarget
from draftwood.target.native.weights import assemble, tensor_shapes

BOS, EOS = 256, 257
VOCAB_SIZE = 258

TINY_CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB_SIZE,
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
    qkv_bias=False,
    o_bias=False,
    qk_norm=False,
    eos_token_ids=(EOS,),
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
) -> NativeTarget:
    """A native target with seeded random weights, large enough in scale that its choices are not near ties."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        scale = 0.5 if len(shape) == 1 else 2.0 / shape[-1] ** 0.5
        noise = torch.randn(shape, generator=generator) * scale
        tensors[name] = noise + 1.0 if "norm" in name else noise
    weights = assemble(config, lambda name: tensors[name].to(device=device, dtype=dtype), quantize=quantize)
    return NativeTarget("tiny", config, weights, cache_tokens, backend=backend)


class ByteTokenizer:
    """Every byte is a token; two more open and close a text."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)
    special_ids = frozenset((BOS, EOS))
    has_chat = True

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return [BOS] * add_special + list(text.encode(errors="replace"))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        names = {} if skip_special else {BOS: b"<bos>", EOS: b"<eos>"}
        pieces = (bytes((i,)) if i < 256 else names.get(i, b"") for i in ids)
        return b"".join(pieces).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        text = self.decode([token_id], skip_special=False)
        return text if text.isprintable() else repr(bytes((token_id,)))[2:-1]

    def token_bytes(self, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id < 256 else self.token_text(token_id).encode()

    def apply_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in check_messages(messages))
        return self.encode(text + "assistant: " * add_generation_prompt)
